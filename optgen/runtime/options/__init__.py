"""The options of parameter groups, plans of single parameters, and blocks of rows."""
