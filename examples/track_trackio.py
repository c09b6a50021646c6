"""Log a run to trackio: `python examples/track_trackio.py`, or `flatout train digits --track trackio`.

Needs `pip install 'flatout[trackio]'`; `trackio show` shows the run.
"""

import flatout

run = flatout.fit(
    job="digits", epochs=3, devices="cpu", out="digits-trackio", callbacks=[flatout.Trackio(project="digits")]
)
