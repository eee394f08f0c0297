"""How many ranks have gradients, counted once in a step."""

from support.in_process_ranks import RANKS, on_all_ranks

from grace_ext.exchange.gradient_count import GradientCount


class AtOnce:
    """A scheduler that runs what it is given."""

    def run_collective(self, function, *args):
        import concurrent.futures

        future = concurrent.futures.Future()
        future.set_result(function(*args))
        return future


def test_ranks_with_gradients_are_counted_once_in_a_step():
    def work(transport):
        counted = []
        count = GradientCount(AtOnce(), transport)
        for step in range(3):
            count.start(f"count.{step}", transport.rank < step)
            counted += [count.take(), count.take()]
        count.start("count.forgotten", True)
        count.forget()
        return [*counted, count.take()]

    assert on_all_ranks(work) == [[0, None, 1, None, 2, None, None]] * RANKS
