"""Show progress, loss, throughput and memory on the terminal."""

from tqdm import tqdm

from lean_finetune.train.callbacks.callback import Callback, Row
from lean_finetune.train.monitor.memory_monitor import memory_text


class ProgressBar(Callback):
    """A progress bar on stderr, and one line per held-out loss on stdout."""

    def on_start(self) -> None:
        """Open the bar."""
        self._bar = tqdm(
            total=self.info.total_steps,
            initial=self.info.first_step,
            desc="train",
            unit="step",
            disable=not self.info.show_progress,
        )

    def on_step(self, row: Row) -> None:
        """Advance the bar."""
        tokens_per_second = row["tokens"] / row["seconds"]
        text = f"loss {row['loss']:.4f}, {tokens_per_second:,.0f} tokens/s, {memory_text(row)}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()

    def on_heldout(self, row: Row) -> None:
        """Print both losses."""
        self._bar.write(f"step {row['step'] + 1}: loss {row['loss']:.4f}, held-out loss {row['heldout_loss']:.4f}")

    def on_end(self, peak_bytes: int | None) -> None:
        """Close the bar."""
        self._bar.close()

    def on_fault(self, error: BaseException) -> None:
        """Close the bar."""
        self._bar.close()
