"""Updates within backward, and states in host memory."""
