"""What turns graphs and regions into something that runs."""
