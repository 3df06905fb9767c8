"""Built environments: where they are stored, how they are built, and rehearsing a job's environment here."""
