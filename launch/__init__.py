"""Start the processes of a training job, with the environment variables that torchrun would set.

``python -m gradsplit.launch --nproc-per-node 2 train.py`` (console script: ``mpi-torchrun``) starts them on this
machine; ``--hostfile hosts`` starts ``mpiexec`` for several; ``mpiexec -n 4 python -m gradsplit.launch train.py`` uses
the ranks that are there already, on any number of nodes, and so does ``srun``, with MPI or without.

Who runs what::

    python -m gradsplit.launch  job.py        with a hostfile: starts mpiexec, hands on signals and the exit code
      mpiexec -n N
        supervisor              worker.py     agrees on addresses with the others, spreads a failure
          the user's script     plain Python  sees torchrun's variables and nothing of MPI

On one machine the launcher itself is the only supervisor, of all processes. No MPI takes part, nothing of the
launcher listens on a network (`lone_world`), and a job starts as fast as its processes.

Note [A child process per rank]
Under MPI the script could also run inside the rank itself (``runpy``), where it could use mpi4py. It runs in a
child because

- a process that dies (signal, ``os._exit``, out of memory) cannot then take MPI's shutdown with it: the
  supervisor is alive, knows the exact exit status, and tells the other ranks, so nobody waits for a dead
  rank;
- the training process has no MPI library, progress threads or fork handlers beside gloo, NCCL and data loader
  workers (`process_keeper`);
- ``sys.exit``, ``__main__``, ``sys.path`` and signal handling are those of ``python train.py``.

The price: a script that itself wants ``MPI.COMM_WORLD`` has to be started by ``mpiexec`` directly, and each
rank costs one idle supervisor (some 30 MB, asleep but for a glance every few milliseconds).
"""

if __name__ == "launch":
    from gradsplit.give_way import give_way

    give_way(__name__)
