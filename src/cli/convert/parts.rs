//! What slots need of a sequence besides the rows of layers that see everything: rows of layers with a window, and the
//! states of recurrent ones. They are read by their names, since a scan wants whole pages.

use std::fs::read_dir;
use std::io::{self, Read, Seek, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use kvfs_formats::slot::{Caches, check_checkpoints};

use super::unwritten::Unwritten;
use crate::page::limits::{MAX_FILE_BYTES, PAYLOAD_OFFSET, index};
use crate::page::names::{
    format_checkpoints, format_layer, format_page, format_state, format_tail, format_window_rows,
    parse_state,
};
use crate::page::{Layer, Manifest, PageView, StatePlace, StateTensor, TokenStart};
use crate::reader::Sequence;
use crate::sys;

/// Of a file that is copied at once.
const COPIED_BYTES: usize = 1 << 16;

/// The files of a sequence.
pub(super) struct Parts<'a> {
    path: &'a Path,
    manifest: &'a Manifest,
    ids: Vec<u8>,
}

impl<'a> Parts<'a> {
    pub(super) fn new(path: &'a Path, manifest: &'a Manifest, ids: &[u32]) -> Self {
        Self { path, manifest, ids: ids.iter().flat_map(|id| id.to_le_bytes()).collect() }
    }

    fn directory(&self, layer: Layer) -> PathBuf {
        self.path.join(format_layer(layer))
    }

    /// K, or V, of some tokens of a layer, row after row.
    pub(super) fn rows(
        &self, layer: Layer, wanted: Range<u32>, is_v: bool,
    ) -> Result<Vec<u8>, String> {
        let page_tokens = self.manifest.geometry().page_tokens();
        let mut rows = Vec::new();
        let mut next = wanted.start;
        while next < wanted.end {
            let start = next - next % page_tokens;
            let end = wanted.end.min(start.saturating_add(page_tokens));
            let added = self.rows_of_page(layer, start, next..end, is_v, &mut rows)?;
            if !added {
                let path = self.directory(layer);
                return Err(format!("{} lacks rows of tokens {next} to {end}", path.display()));
            }
            next = end;
        }
        Ok(rows)
    }

    /// Appends rows that are of one page, if they are there.
    fn rows_of_page(
        &self, layer: Layer, start: u32, wanted: Range<u32>, is_v: bool, to: &mut Vec<u8>,
    ) -> Result<bool, String> {
        let geometry = self.manifest.geometry();
        let heads = geometry.num_kv_heads();
        let token = |first: u32| TokenStart(u64::from(first));
        let directory = self.directory(layer);
        let path = directory.join(format_page(token(start)));
        if let Some(bytes) = read(&path)? {
            let page = PageView::parse(&bytes, geometry)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            if page.tokens() < wanted.end - start {
                return Ok(false);
            }
            for token in wanted.start - start..wanted.end - start {
                for head in 0..heads {
                    let row = if is_v { page.v_row(head, token) } else { page.k_row(head, token) };
                    to.extend_from_slice(row);
                }
            }
            return Ok(true);
        }
        let row_bytes = index(geometry.row_bytes());
        let k_bytes = index(u64::from(heads) * geometry.k_row_bytes());
        let files = [
            (format_tail(token(start)), start),
            (format_window_rows(token(wanted.start)), wanted.start),
        ];
        for (name, first) in files {
            let Some(bytes) = read(&directory.join(name))? else { continue };
            let rows = bytes.chunks_exact(row_bytes).skip((wanted.start - first) as usize);
            let rows: Vec<&[u8]> = rows.take(wanted.len()).collect();
            if rows.len() < wanted.len() {
                continue;
            }
            let part =
                |row: &&[u8]| if is_v { row[k_bytes..].to_vec() } else { row[..k_bytes].to_vec() };
            to.extend(rows.iter().flat_map(part));
            return Ok(true);
        }
        Ok(false)
    }

    /// A tensor of the state of a layer after some tokens.
    pub(super) fn state(
        &self, layer: Layer, tokens: u32, tensor: usize,
    ) -> Result<Vec<u8>, String> {
        let manifest = self.manifest;
        let row = TokenStart(u64::from(tokens));
        let path = self.directory(layer).join(format_state(row));
        let explain = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        let bytes = read(&path)?.ok_or_else(|| explain(&"is not there"))?;
        let place = StatePlace::new(manifest, layer, row).map_err(|error| explain(&error))?;
        let found = place.verify_bytes(&bytes).map_err(|error| explain(&error))?;
        let seen = self.ids.get(..4 * tokens as usize).and_then(|ids| manifest.prefix_of(ids));
        if seen != Some(found.header.prefix) {
            return Err(explain(&"is of other tokens than those of the sequence"));
        }
        let bytes_of = |tensor: &StateTensor| tensor.bytes().unwrap_or(0);
        let tensors = &place.shape().state;
        let begin = PAYLOAD_OFFSET + tensors.iter().take(tensor).map(bytes_of).sum::<u64>();
        let length = tensors.get(tensor).map_or(0, bytes_of);
        Ok(bytes[index(begin)..index(begin + length)].to_vec())
    }
}

impl Parts<'_> {
    /// Writes what a server has kept to go back from so many tokens to earlier ones, if it is there.
    pub(super) fn write_checkpoints(
        &self, tokens: u32, to: &mut impl Write,
    ) -> Result<(), Unwritten> {
        let path = self.path.join(format_checkpoints(TokenStart(u64::from(tokens))));
        let explain = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        let mut file = match sys::open_regular_no_follow(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            outcome => outcome.map_err(|error| explain(&error))?,
        };
        let copy = file.try_clone().map_err(|error| explain(&error))?;
        check_checkpoints(copy, tokens).map_err(|why| explain(&why))?;
        file.rewind().map_err(|error| explain(&error))?;
        let mut bytes = vec![0; COPIED_BYTES];
        loop {
            let count = match file.read(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                outcome => outcome.map_err(|error| explain(&error))?,
            };
            if count == 0 {
                return Ok(());
            }
            to.write_all(&bytes[..count])?;
        }
    }
}

/// After how many of the first `known` tokens a slot of a sequence can be made.
pub(super) fn tokens(
    (sequence, path): (&Sequence, &Path), caches: &Caches, known: u64,
) -> Result<u64, String> {
    let mut tokens = known;
    for layer in caches.rows.iter().filter(|cache| cache.window.is_none()).flat_map(|it| &it.layers)
    {
        let end = sequence.layer_tokens(*layer).map_err(|error| error.to_string())?;
        tokens = tokens.min(end);
    }
    let Some((first, _)) = caches.states.first() else { return Ok(tokens) };
    let directory = |layer| path.join(format_layer(layer));
    for (layer, _) in &caches.states {
        let found = sys::metadata_no_follow(&directory(*layer));
        found
            .map(drop)
            .or_else(absent)
            .map_err(|error| format!("{}: {error}", directory(*layer).display()))?;
    }
    let entries = match read_dir(directory(*first)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries.map_err(|error| error.to_string())?,
    };
    let rows = entries.flatten().filter_map(|entry| parse_state(entry.file_name().as_bytes()));
    let mut rows: Vec<u64> = rows.map(|row| row.0).filter(|row| *row <= tokens).collect();
    rows.sort_unstable_by(|one, other| other.cmp(one));
    let has_all = |row: &u64| {
        let name = format_state(TokenStart(*row));
        caches.states.iter().all(|(layer, _)| directory(*layer).join(&name).exists())
    };
    Ok(rows.into_iter().find(has_all).unwrap_or(0))
}

fn absent(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, String> {
    match sys::read_no_follow(path, MAX_FILE_BYTES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        outcome => outcome.map(Some).map_err(|error| format!("{}: {error}", path.display())),
    }
}
