"""What `graph_audit.py` is made of: reading a graph, the contracts of its operators, and the shapes of its values."""
