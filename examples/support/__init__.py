# SPDX-License-Identifier: Apache-2.0
"""Shared code of the examples, so that each can focus on its own subject.

`import support` comes before TensorFlow, whose environment it sets. An example reads

    import support
    import tensorflow as tf
    from absl import flags
    import replicator

    FLAGS = flags.FLAGS
    support.define_flags("runs/mine", epochs=10)  # --devices, --epochs, --seed, ...
    support.define_positive("learning_rate", 1e-3, "Adam's learning rate.")

    def main() -> str:
        repl = replicator.Replicator(FLAGS.devices)
        output_dir = support.output_folder()  # of --output_dir
        ...  # model and optimizer, under repl.context()
        run = support.Run(
            output_dir,
            support.settings("learning_rate", "seed"),  # a resumed run has the same
            {"model": model, "optimizer": optimizer},  # the contents of checkpoints
            steps=steps,
            resume=FLAGS.resume,
            panels=[support.Panel(["loss"], "training loss", log=True)],
        )
        step_fn = repl.build(train_step, input_fn_from(run.step))
        for step in run.steps():  # from run.step + 1 to the last one
            run.log(loss=float(step_fn()[0]))
            if step % 100 == 0:
                run.save()  # first, so that no printed step can be lost
                run.tell(f"step {step}: ...")  # a line above the progress bar
        return f"Results are in {output_dir}."  # the last line to print

    if __name__ == "__main__":
        support.start(main)

If a run is counted in epochs, each of which ends with an accuracy, that loop is
`accuracy = run.train(step_fn, test_accuracy)`, and its panels are LOSS_AND_ACCURACY.

`run.steps()` shows a progress bar, saves a checkpoint at intervals, and leaves
`checkpoints/`, `history.json`, `summaries/` and `curves.png` in the output folder. A
signal to stop ends it after the current step, with a checkpoint. The yielded step
counts from 1; numbers logged in the body of the loop belong to that step.

`start` reports usage errors in one line and exits with status 2: raise
`support.UsageError` for invalid flags; errors of Replicator are treated alike. Full
disks and the like end with one line and status 1, and signals with the shells' status
for them.

Data come from `mnist`, `shuffled_input`, `single_pass_input` and `library_text`;
`accuracy_on` and `share_of_right` evaluate, and `save_images` and `save_grid` draw.
"""

from support import environment as environment  # before TensorFlow
from support.checkpoints import Checkpoints
from support.data import (
    Examples,
    InputFn,
    mnist,
    shuffled_input,
    single_pass_input,
)
from support.evaluation import accuracy_on, share_of_right
from support.history import History, Panel, plot_curves
from support.interruption import SIGNALS, Interruption
from support.pictures import save_grid, save_images
from support.program import (
    MOST_STEPS,
    Interrupted,
    UsageError,
    check_batch_size,
    define_between,
    define_count,
    define_flags,
    define_positive,
    explain,
    output_folder,
    settings,
    start,
    warn,
)
from support.run import LOSS_AND_ACCURACY, Run, check_settings
from support.text import library_files, library_text

__all__ = [
    "LOSS_AND_ACCURACY",
    "MOST_STEPS",
    "SIGNALS",
    "Checkpoints",
    "Examples",
    "History",
    "InputFn",
    "Interrupted",
    "Interruption",
    "Panel",
    "Run",
    "UsageError",
    "accuracy_on",
    "check_batch_size",
    "check_settings",
    "define_between",
    "define_count",
    "define_flags",
    "define_positive",
    "explain",
    "library_files",
    "library_text",
    "mnist",
    "output_folder",
    "plot_curves",
    "save_grid",
    "save_images",
    "settings",
    "share_of_right",
    "shuffled_input",
    "single_pass_input",
    "start",
    "warn",
]
