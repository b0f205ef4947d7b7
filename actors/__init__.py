"""The Ray edition: a supervisor, pools of warm actors, and the client. The only folder that imports Ray."""
