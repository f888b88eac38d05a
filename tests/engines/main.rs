//! Whole programs of others, unmodified, on a mount: what they saved is there after everything that
//! can be killed was killed and the bytes have been to the remote and back.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod engine;
mod hugging_face;
mod llama_server;
mod odd_servers;
mod watch;
mod watched;

use std::path::PathBuf;

/// The Python that has what the tests call.
fn python() -> String {
    std::env::var("KVFS_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

fn in_repository(path: &str) -> PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}
