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
    // Of 40 query heads on 8 KV heads, and of 16 on one latent row of which the first 512 elements are V.
    let grouped = (Shape::new(40, 8, 128, 128)?, false);
    let latent = (Shape::new(16, 1, 576, 512)?, true);
    let all = [Dtype::F16, Dtype::Bf16, Dtype::Q8_0, Dtype::Q4_0, Dtype::F8E4m3];
    for ((shape, is_latent), dtypes) in [(grouped, &all[..]), (latent, &all[..1])] {
        for (tokens, rounds) in [(16 << 10, 9), (64 << 10, 5)] {
            for threads in [1, 2] {
                let dtypes = dtypes.to_vec();
                let memory_bytes = 512 << 20;
                print(&Setting {
                    shape,
                    is_latent,
                    tokens,
                    threads,
                    dtypes,
                    rounds,
                    memory_bytes,
                })?;
            }
        }
    }
    Ok(())
}

fn print(setting: &Setting) -> Result<(), AttentionError> {
    let figures = measure(setting)?;
    for figure in &figures {
        let (bytes, seconds) = (figure.layer_bytes as f64, figure.seconds());
        println!(
            "{:7} {:6} {:7} {:9.3} {:5.1} {:10.3} {:11.3} {:12.1} {:10.2}",
            if setting.is_latent { "latent" } else { figure.dtype.name() },
            setting.tokens,
            setting.threads,
            seconds * 1e3,
            bytes / seconds / 1e9,
            figure.stream_ratio(),
            figure.arithmetic_ratio(),
            bytes / seconds / 1e9 / figure.stream_ratio(),
            figures[0].seconds() / seconds
        );
    }
    Ok(())
}
