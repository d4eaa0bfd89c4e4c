"""Measuring a model on text: perplexity, and how far its distributions are from another's."""

from exllamav3.evaluation.evaluate import Evaluation, evaluate
from exllamav3.evaluation.metrics import RowMetrics, compare_row, score_row
from exllamav3.evaluation.rows import token_rows

__all__ = ["Evaluation", "RowMetrics", "compare_row", "evaluate", "score_row", "token_rows"]
