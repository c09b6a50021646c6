"""Log a run to MLflow: `python examples/track_mlflow.py`, or `flatout train digits --track mlflow`.

Needs `pip install 'flatout[mlflow]'`; `mlflow ui` shows the run.
"""

import flatout

run = flatout.fit(
    job="digits", epochs=3, devices="cpu", out="digits-mlflow", callbacks=[flatout.MLflow(experiment="digits")]
)
