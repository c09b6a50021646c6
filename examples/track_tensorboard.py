"""Log a run to TensorBoard: `python examples/track_tensorboard.py`, or `flatout train digits --track tensorboard`.

Needs `pip install 'flatout[tensorboard]'`; `tensorboard --logdir .` shows the run.
"""

import flatout

run = flatout.fit(job="digits", epochs=3, devices="cpu", out="digits-tensorboard", callbacks=[flatout.TensorBoard()])
