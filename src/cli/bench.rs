//! STUB of the benchmarks.

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct BenchArguments {
    /// What to measure
    #[arg(default_value = "fs")]
    pub what: String,
}

/// Stub.
pub fn run(arguments: &BenchArguments) -> Result<(), String> {
    Err(format!("bench {} is a stub", arguments.what))
}
