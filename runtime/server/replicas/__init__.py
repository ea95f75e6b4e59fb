"""Several processes that each hold the model, behind one server. `ray_fleet` alone imports Ray."""
