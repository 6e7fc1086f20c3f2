"""The types that flow between the stages."""
