//! `cargo bench --bench attention`: attention against reading memory. The column `arithmetic` is what
//! the share of the stream could be at most.

#![allow(clippy::print_stdout, clippy::cast_precision_loss, reason = "a table for people")]

use kvfs::attention::bench::{Setting, measure};
use kvfs::attention::{AttentionError, Shape};
use kvfs::page::Dtype;

fn main() -> Result<(), AttentionError> {
    println!(
        "dtype  tokens threads  ms/layer  GB/s  of stream  arithmetic  stream GB/s  times f16"
    );
    for (tokens, rounds) in [(16 << 10, 9), (64 << 10, 5)] {
        for threads in [1, 2] {
            let setting = Setting {
                shape: Shape::new(40, 8, 128, 128)?,
                tokens,
                threads,
                dtypes: vec![Dtype::F16, Dtype::Bf16, Dtype::Q8_0, Dtype::Q4_0, Dtype::F8E4m3],
                rounds,
                memory_bytes: 512 << 20,
            };
            let figures = measure(&setting)?;
            for figure in &figures {
                let (bytes, seconds) = (figure.layer_bytes as f64, figure.seconds());
                println!(
                    "{:7} {tokens:6} {threads:7} {:9.3} {:5.1} {:10.3} {:11.3} {:12.1} {:10.2}",
                    figure.dtype.name(),
                    seconds * 1e3,
                    bytes / seconds / 1e9,
                    figure.stream_ratio(),
                    figure.arithmetic_ratio(),
                    bytes / seconds / 1e9 / figure.stream_ratio(),
                    figures[0].seconds() / seconds
                );
            }
        }
    }
    Ok(())
}
