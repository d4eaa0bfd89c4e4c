"""Text generation: jobs, the loop that runs them in a batch, and samplers."""

from exllamav3.generator.generator import Generator
from exllamav3.generator.job import Job
from exllamav3.generator.sampler import (
    ArgmaxSampler,
    CategoricalSampler,
    ComboSampler,
    CustomSampler,
    DefaultSampler,
    GreedySampler,
    Sampler,
    TopKSampler,
    TopPSampler,
)

__all__ = [
    "ArgmaxSampler",
    "CategoricalSampler",
    "ComboSampler",
    "CustomSampler",
    "DefaultSampler",
    "Generator",
    "GreedySampler",
    "Job",
    "Sampler",
    "TopKSampler",
    "TopPSampler",
]
