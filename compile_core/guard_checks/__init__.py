"""The check before each call that all guards of a captured frame still hold."""
