//! A directory: a layer, a sequence, or a whole model, added up.

use std::fs::DirEntry;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::describe_manifest;
use super::places::Places;
use crate::cli::summary::Summary;
use crate::page::Manifest;
use crate::page::limits::MANIFEST_BYTES_READ;
use crate::page::names::{
    LayerEntry, MANIFEST, SEQUENCES, TOKENS, is_unfinished, layer_entry, parse_layer,
};
use crate::sys;

/// What lies in a directory.
#[derive(Debug, Default)]
struct Totals {
    sequences: u64,
    layers: u64,
    tokens: u64,
    pages: u64,
    tails: u64,
    states: u64,
    bytes: u64,
    places: Places,
}

/// Explains a directory.
pub(super) fn inspect(path: &Path, summary: &mut Summary) -> io::Result<()> {
    let mut totals = Totals::default();
    if path.join(MANIFEST).is_file() {
        summary.add("kind", "model");
        let manifest = sys::read_no_follow(&path.join(MANIFEST), MANIFEST_BYTES_READ)?;
        match Manifest::parse(&manifest) {
            Ok(manifest) => describe_manifest(&manifest, summary),
            Err(error) => summary.add("refused", error.to_string()),
        }
        let sequences = path.join(SEQUENCES);
        if sequences.is_dir() {
            totals.add_sequences(&sequences)?;
        }
        summary.add("sequences", totals.sequences);
    } else if path.file_name() == Some(SEQUENCES.as_ref()) {
        summary.add("kind", "sequences");
        totals.add_sequences(path)?;
        summary.add("sequences", totals.sequences);
    } else if is_layer(path) {
        summary.add("kind", "layer");
        totals.add_layer(path)?;
        totals.describe(summary);
        return Ok(());
    } else {
        totals.add_sequence(path)?;
        if totals.layers == 0 && totals.bytes == 0 {
            summary.add("kind", "directory");
            return Ok(());
        }
        summary.add("kind", "sequence");
        summary.add("layers", totals.layers);
    }
    summary.add("tokens", totals.tokens);
    totals.describe(summary);
    Ok(())
}

fn is_layer(path: &Path) -> bool {
    let name = path.file_name().map(OsStrExt::as_bytes);
    name.and_then(parse_layer).is_some()
}

/// The entries of a directory that are complete.
fn entries(path: &Path) -> io::Result<impl Iterator<Item = io::Result<DirEntry>>> {
    Ok(path.read_dir()?.filter(|entry| {
        entry.as_ref().map_or(true, |entry| !is_unfinished(entry.file_name().as_bytes()))
    }))
}

impl Totals {
    fn add_sequences(&mut self, path: &Path) -> io::Result<()> {
        for entry in entries(path)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                self.sequences += 1;
                self.add_sequence(&entry.path())?;
            }
        }
        Ok(())
    }

    fn add_sequence(&mut self, path: &Path) -> io::Result<()> {
        for entry in entries(path)? {
            let entry = entry?;
            if entry.file_name() == TOKENS {
                let bytes = entry.metadata()?.len();
                self.tokens += bytes / 4;
                self.bytes += bytes;
            } else if entry.file_type()?.is_dir() && is_layer(&entry.path()) {
                self.layers += 1;
                self.add_layer(&entry.path())?;
            }
        }
        Ok(())
    }

    fn add_layer(&mut self, path: &Path) -> io::Result<()> {
        self.places.add_layer(path)?;
        for entry in entries(path)? {
            let entry = entry?;
            match layer_entry(entry.file_name().as_bytes()) {
                LayerEntry::Page(_) => self.pages += 1,
                LayerEntry::Tail(_) => self.tails += 1,
                LayerEntry::State(_) => self.states += 1,
                LayerEntry::Staging | LayerEntry::Other => continue,
            }
            self.bytes += entry.metadata()?.len();
        }
        Ok(())
    }

    fn describe(&self, summary: &mut Summary) {
        summary.add("pages", self.pages);
        summary.add("tails", self.tails);
        if self.states > 0 {
            summary.add("states", self.states);
        }
        summary.add_bytes("bytes", self.bytes);
        self.places.describe(summary);
    }
}
