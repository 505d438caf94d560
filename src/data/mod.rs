//! JSONL to token streams, on host threads.
