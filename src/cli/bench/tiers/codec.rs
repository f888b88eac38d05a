//! Encoding and decoding cold copies, against the `zstd` command on the same bytes.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::resource::{Usage, UsageWho, getrusage};

use super::super::figure::Figure;
use super::super::measure::{at, interleave, throughput, timed};
use super::super::note;
use super::super::transfer::gigabytes;
use super::super::workplace::Workplace;
use super::Sizes;
use super::ratios;
use super::values::{self, Page};
use crate::tier::encoding::{Lossless, Stored, Subject, ZstdLevel, decode, decode_local, encode};

/// Threads on both sides.
const THREADS: usize = 2;

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("encoding");
    let pages = values::pages(sizes.encoded_pages, 1)?;
    let mut figures = ratios::figures(&pages)?;
    let plain = workplace.native().join("pages");
    let bytes: Vec<u8> = pages.iter().flat_map(|page| &page.bytes).copied().collect();
    fs::write(&plain, &bytes).map_err(at(&plain))?;
    if Command::new("zstd").arg("--version").stdout(Stdio::null()).status().is_err() {
        note("there is no zstd command to compare with: no figures of speed");
        return Ok(figures);
    }
    let compressed = plain.with_extension("zst");
    let total = bytes.len() as u64;
    let rounds = interleave(
        sizes.rounds,
        |_| encode_all(&pages),
        |_| zstd(&["-3", "-T2"], &plain, None).map(|time| throughput(total, time)),
    )?;
    figures.push(gigabytes("encode_pages_zstd3_2_threads", 0.8, rounds));
    zstd(&["-3", "-T2"], &plain, Some(&compressed))?;
    for (name, is_page, is_local) in [
        ("decode_zstd3_per_core", false, false),
        ("decode_pages_per_core", true, false),
        ("decode_local_pages_per_core", true, true),
    ] {
        let blobs = pages.iter().map(|page| blob(page, is_page)).collect::<Result<Vec<_>, _>>()?;
        let rounds = interleave(
            sizes.rounds,
            |_| decode_all(&blobs, total, is_local),
            |_| {
                let children = UsageWho::RUSAGE_CHILDREN;
                let before = processor_time(children)?;
                zstd(&["-d"], &compressed, None)?;
                Ok(throughput(total, processor_time(children)?.saturating_sub(before)))
            },
        )?;
        figures.push(gigabytes(name, 0.8, rounds));
    }
    Ok(figures)
}

fn subject(page: &Page, is_page: bool) -> Subject {
    if is_page { Subject::Page(page.place.identity(page.tokens)) } else { Subject::File }
}

/// GB/s of encoding pages with two threads, as the mover does, into files without a name.
fn encode_all(pages: &[Page]) -> Result<f64, String> {
    let bytes: usize = pages.iter().map(|page| page.bytes.len()).sum();
    let encode_some = |pages: &[Page]| {
        pages.iter().try_for_each(|page| {
            let (subject, length) = (subject(page, true), page.bytes.len() as u64);
            let lossless = Lossless::Zstd(ZstdLevel::DEFAULT);
            let sink = &mut io::sink();
            let encoded = encode(&mut page.bytes.as_slice(), length, lossless, &subject, sink);
            encoded.map(drop).map_err(|error| error.to_string())
        })
    };
    let duration = timed(|| {
        thread::scope(|scope| {
            let parts = pages.chunks(pages.len().div_ceil(THREADS).max(1));
            let threads: Vec<_> = parts.map(|part| scope.spawn(|| encode_some(part))).collect();
            threads.into_iter().try_for_each(|thread| {
                thread.join().map_err(|_| "an encoder panicked".to_owned())?
            })
        })
    })?;
    Ok(throughput(bytes as u64, duration))
}

/// A blob, what it is on record as, and what it holds.
struct Blob {
    bytes: Vec<u8>,
    stored: Stored,
    subject: Subject,
}

fn blob(page: &Page, is_page: bool) -> Result<Blob, String> {
    let (subject, length) = (subject(page, is_page), page.bytes.len() as u64);
    let lossless = Lossless::Zstd(ZstdLevel::DEFAULT);
    let mut bytes = Vec::new();
    let encoded = encode(&mut page.bytes.as_slice(), length, lossless, &subject, &mut bytes)
        .map_err(|error| error.to_string())?;
    let stored_bytes = encoded.stored_bytes;
    Ok(Blob { bytes, stored: Stored { encoding: encoded.encoding, stored_bytes, length }, subject })
}

/// GB per second of processor time.
fn decode_all(blobs: &[Blob], total: u64, is_local: bool) -> Result<f64, String> {
    let before = processor_time(UsageWho::RUSAGE_SELF)?;
    for Blob { bytes, stored, subject } in blobs {
        let (source, sink) = (&mut bytes.as_slice(), &mut io::sink());
        let outcome = if is_local {
            decode_local(source, stored, subject, sink).map(drop)
        } else {
            decode(source, stored, subject, sink).map(drop)
        };
        outcome.map_err(|error| error.to_string())?;
    }
    Ok(throughput(total, processor_time(UsageWho::RUSAGE_SELF)?.saturating_sub(before)))
}

/// What the processor has spent so far.
pub(super) fn processor_time(who: UsageWho) -> Result<Duration, String> {
    let usage: Usage = getrusage(who).map_err(|error| error.to_string())?;
    let time = [usage.user_time(), usage.system_time()].map(|time| {
        Duration::from_secs(time.tv_sec().unsigned_abs())
            + Duration::from_micros(time.tv_usec().unsigned_abs())
    });
    Ok(time[0] + time[1])
}

/// Runs the command; how long it took.
fn zstd(options: &[&str], input: &Path, output: Option<&Path>) -> Result<Duration, String> {
    let sink = match output {
        Some(path) => Stdio::from(File::create(path).map_err(at(path))?),
        None => Stdio::null(),
    };
    let mut command = Command::new("zstd");
    command.args(options).args(["-q", "-c"]).arg(input).stdin(Stdio::null()).stdout(sink);
    timed(|| match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("zstd: {status}")),
        Err(error) => Err(format!("zstd: {error}")),
    })
}
