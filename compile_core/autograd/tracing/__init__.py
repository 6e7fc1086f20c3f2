"""Recording a program's operators, forward and backward, as nodes of a functional graph."""
