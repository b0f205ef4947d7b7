"""Sandboxes: workspaces in which an agent's commands run."""
