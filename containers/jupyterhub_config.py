"""A JupyterHub for a class, with one container for each student: `jupyterhub -f containers/jupyterhub_config.py`."""

import os
import sys

c = get_config()  # noqa: F821  # JupyterHub defines it

# Replace this with your school's authenticator. Here any user name may log in, with one password for the class.
c.JupyterHub.authenticator_class = "shared-password"
c.SharedPasswordAuthenticator.user_password = os.environ["CLASS_PASSWORD"]
c.Authenticator.allow_all = True

# The hub's address on Docker's bridge, where students' servers reach it.
c.JupyterHub.hub_ip = "172.17.0.1"

c.JupyterHub.spawner_class = "dockerspawner.DockerSpawner"
c.DockerSpawner.image = "ddp-lab:0.1.0"
c.DockerSpawner.cmd = ["jupyterhub-singleuser"]
c.DockerSpawner.notebook_dir = "/home/learner/ddp_lab_lessons"
c.DockerSpawner.volumes = {"ddp-lab-{username}": "/home/learner"}
c.DockerSpawner.remove = True  # a stopped server leaves no container; its volume stays

# A student's share of the machine.
c.DockerSpawner.cpu_limit = 2
c.DockerSpawner.mem_limit = "4G"
c.DockerSpawner.extra_host_config = {"shm_size": "1g", "pids_limit": 512, "init": True}
c.DockerSpawner.environment = {"OMP_NUM_THREADS": "1"}  # a limit of CPU time does not change the number of threads

# A server without activity for an hour is stopped, with all that runs in its container.
c.JupyterHub.load_roles = [
    {
        "name": "idle-culler",
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
        "services": ["idle-culler"],
    }
]
c.JupyterHub.services = [
    {"name": "idle-culler", "command": [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600"]}
]
