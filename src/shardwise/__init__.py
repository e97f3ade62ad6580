"""shardwise: which FSDP configuration fits my GPUs and hides its communication?"""

__version__ = "0.1.0"
