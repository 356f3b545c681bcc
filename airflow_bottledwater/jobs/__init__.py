"""A job from its submission to its end: its record and heartbeats in the shared topic, the requests to it, and how it
is submitted, watched, stopped, started again and cleared away, by Airflow and by the command."""
