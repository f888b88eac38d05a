//! The files of one layer: pages, and the tail behind them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;
use kvfs::attention::KvBlock;
use kvfs::cuda::WriteBack;
use kvfs::page::names::{LayerEntry, format_layer, format_page, format_tail, layer_entry};
use kvfs::page::{Geometry, Layer, Manifest, PagePlace, TokenStart, pack_page};

use super::files::{about, publish, remove};
use super::page::MappedPage;
use crate::Result;

/// A layer's directory.
///
/// Pages have numbers here: page `n` begins at token `n * page_tokens`. The tail is the open page.
#[derive(Debug)]
pub(super) struct LayerFiles {
    layer: Layer,
    manifest: Arc<Manifest>,
    directory: PathBuf,
    pages: BTreeMap<usize, MappedPage>,
    tail: Option<Tail>,
    /// Tokens from the first to the last one that has rows; pages before it may be missing.
    end: usize,
    /// Pages made since the last sync.
    unsynced: Vec<File>,
    /// The rows of the tail, as they were read last.
    rows: Vec<u8>,
    /// Which page `rows` are of, where they come here before they are in the file.
    open: Option<usize>,
}

/// Who writes the rows of an open page.
#[derive(Debug)]
pub(super) enum Writer<'a> {
    /// The caller.
    Now,
    /// Somebody else, meanwhile they are in memory as well.
    Later(&'a mut WriteBack),
    /// Nobody: they stay in memory until [`LayerFiles::settle`].
    Memory,
}

/// An open tail.
#[derive(Debug)]
struct Tail {
    number: usize,
    path: PathBuf,
    file: File,
    /// Bytes in the file; an interrupted write may have left a part of a row.
    bytes: usize,
}

impl LayerFiles {
    /// Opens the directory, or makes it, and maps its pages.
    pub(super) fn open(sequence: &Path, layer: Layer, manifest: &Arc<Manifest>) -> Result<Self> {
        let directory = sequence.join(format_layer(layer));
        fs::create_dir_all(&directory).map_err(about(&directory))?;
        let mut files = Self {
            layer,
            manifest: Arc::clone(manifest),
            directory,
            pages: BTreeMap::new(),
            tail: None,
            end: 0,
            unsynced: Vec::new(),
            rows: Vec::new(),
            open: None,
        };
        files.scan()?;
        Ok(files)
    }

    /// How many of the first `wanted` tokens could be kept, seen from this layer. Whole missing
    /// pages are no hindrance, they can be put back; a part of a page is there or not.
    pub(super) fn usable(&self, wanted: usize) -> usize {
        let wanted = wanted.min(self.end);
        let (number, part) = self.split(wanted);
        wanted - part + part.min(self.tokens_of(number))
    }

    /// Whether a full page is there.
    pub(super) fn has_page(&self, number: usize) -> bool {
        self.tokens_of(number) == self.page_tokens() && self.pages.contains_key(&number)
    }

    /// Rows are in the file from here on: those that nobody has written are now.
    pub(super) fn settle(&mut self) -> Result<()> {
        if let Some(number) = self.open.take() {
            let path = self.directory.join(format_tail(self.start(number)));
            let tail = self.tail.insert(Tail::open(number, path)?);
            let unwritten = self.rows.get(tail.bytes..).unwrap_or_default();
            (&tail.file).write_all(unwritten).map_err(about(&tail.path))?;
            tail.bytes += unwritten.len();
        }
        Ok(())
    }

    /// Keeps the rows of the first `end` tokens, of which all are usable.
    pub(super) fn trim(&mut self, end: usize) -> Result<()> {
        let (number, part) = self.split(end);
        // The last first: what an interruption leaves is whole up to its end.
        if let Some(tail) = self.tail.take_if(|tail| tail.number != number) {
            remove(&tail.path)?;
        }
        while let Some((&last, _)) = self.pages.last_key_value()
            && last > number
        {
            self.remove_page(last)?;
        }
        let part_bytes = part * self.row_bytes();
        if let Some(page) = self.pages.get(&number) {
            let rows = page.unpack()?;
            self.remove_page(number)?;
            self.replace_tail(number, &rows[..part_bytes])?;
        } else if let Some(tail) = self.tail.as_ref().filter(|tail| tail.bytes != part_bytes) {
            let rows = tail.read(part_bytes)?;
            self.replace_tail(number, &rows)?;
        }
        self.end = end;
        Ok(())
    }

    /// Tokens from the first to the last one that has rows.
    pub(super) fn end(&self) -> usize {
        self.end
    }

    /// Adds the rows of consecutive tokens, the first of them at `position`. Rows that are there stay.
    /// Returns whether a missing page was put back.
    pub(super) fn append(
        &mut self, position: usize, rows: &[u8], mut writer: Writer<'_>,
    ) -> Result<bool> {
        if position > self.end {
            let layer = self.layer;
            return Err(
                format!("layer {layer}: append at {position} after {} tokens", self.end).into()
            );
        }
        let known = rows.len().min((self.end - position).saturating_mul(self.row_bytes()));
        let (known, mut new) = rows.split_at(known);
        let has_refilled = self.refill(position, known)?;
        while !new.is_empty() {
            let (number, part) = self.split(self.end);
            let page_bytes = self.page_tokens() * self.row_bytes();
            let room = page_bytes - part * self.row_bytes();
            let (rows, rest) = new.split_at(room.min(new.len()));
            let fills = rows.len() == room;
            match &mut writer {
                Writer::Later(writer) if rows.len() == page_bytes => {
                    self.write_page(number, rows)?;
                    writer.skip(self.layer, self.page_tokens() as u64);
                }
                _ if rows.len() == page_bytes => self.write_page(number, rows)?,
                Writer::Later(writer) => self.append_later(number, rows, fills, writer)?,
                Writer::Now => self.append_to_tail(number, rows, fills)?,
                Writer::Memory if fills => return Err("a full page is not kept in memory".into()),
                Writer::Memory => self.append_in_memory(number, rows)?,
            }
            self.end += rows.len() / self.row_bytes();
            new = rest;
        }
        Ok(has_refilled)
    }

    /// The rows of the tokens before `end`, where they lie.
    pub(super) fn blocks(&mut self, end: usize) -> Result<Vec<KvBlock<'_>>> {
        let (last, part) = self.split(end);
        let is_open = self.open == Some(last);
        let tail = self.tail.as_ref().filter(|tail| tail.number == last);
        if let Some(tail) = tail.filter(|_| !is_open)
            && part > 0
        {
            self.rows.resize(part * self.row_bytes(), 0);
            tail.file.read_exact_at(&mut self.rows, 0).map_err(about(&tail.path))?;
        }
        let missing = |number: usize| {
            let start = number * self.page_tokens();
            format!("layer {}: the page at token {start} is missing", self.layer)
        };
        (0..last + usize::from(part > 0))
            .map(|number| match self.pages.get(&number) {
                Some(page) => page.block(self.start(number).0),
                None if number == last && (is_open || tail.is_some()) => {
                    let rows = &self.rows[..(part * self.row_bytes()).min(self.rows.len())];
                    Ok(KvBlock::tail(rows, self.geometry(), self.start(number).0))
                }
                None => Err(missing(number).into()),
            })
            .collect()
    }

    /// Returns when the rows survive a crash.
    pub(super) fn sync(&mut self) -> Result<()> {
        for page in self.unsynced.drain(..) {
            page.sync_all().map_err(about(&self.directory))?;
        }
        if let Some(tail) = &self.tail {
            tail.file.sync_all().map_err(about(&tail.path))?;
        }
        Ok(())
    }

    /// Finds the pages and the tail. A tail that is not behind all pages means nothing.
    fn scan(&mut self) -> Result<()> {
        let mut tails = BTreeMap::new();
        for entry in fs::read_dir(&self.directory).map_err(about(&self.directory))? {
            let name = entry.map_err(about(&self.directory))?.file_name();
            let (start, is_page) = match layer_entry(name.as_bytes()) {
                LayerEntry::Page(start) => (start, true),
                LayerEntry::Tail(start) => (start, false),
                _ => continue,
            };
            let number = usize::try_from(start.0)? / self.page_tokens();
            if is_page {
                let path = self.directory.join(&name);
                let (page, _) = MappedPage::open(&path, self.geometry())?;
                self.pages.insert(number, page);
            } else {
                tails.insert(number, self.directory.join(name));
            }
        }
        let last_page = self.pages.last_key_value().map(|(number, _)| *number);
        if let Some(last) = tails.last_entry()
            && last_page.is_none_or(|page| page < *last.key())
        {
            let (number, path) = last.remove_entry();
            self.tail = Some(Tail::open(number, path)?);
        }
        for path in tails.values() {
            remove(path)?;
        }
        self.seal_full_tail()?;
        let ends = self.pages.keys().copied();
        let ends = ends.chain(self.tail.as_ref().map(|tail| tail.number));
        let ends = ends.map(|number| number * self.page_tokens() + self.tokens_of(number));
        self.end = ends.max().unwrap_or(0);
        Ok(())
    }

    /// An interruption between the append that fills a tail and its sealing leaves it full.
    fn seal_full_tail(&mut self) -> Result<()> {
        let page_bytes = self.page_tokens() * self.row_bytes();
        let Some(tail) = self.tail.as_ref().filter(|tail| tail.bytes >= page_bytes) else {
            return Ok(());
        };
        let (number, rows) = (tail.number, tail.read(page_bytes)?);
        self.write_page(number, &rows)
    }

    /// Puts back the missing pages among rows that were there once.
    fn refill(&mut self, position: usize, rows: &[u8]) -> Result<bool> {
        let end = position + rows.len() / self.row_bytes();
        let (first, (last, part)) = (self.split(position).0, self.split(end));
        let mut has_refilled = false;
        for number in first..last + usize::from(part > 0) {
            let is_tail = self.open == Some(number)
                || self.tail.as_ref().is_some_and(|tail| tail.number == number);
            if is_tail || self.has_page(number) {
                continue;
            }
            let start = number * self.page_tokens();
            let from = start.checked_sub(position).map(|at| at * self.row_bytes());
            let page =
                from.and_then(|from| rows.get(from..from + self.page_tokens() * self.row_bytes()));
            let page = page.ok_or_else(|| {
                let layer = self.layer;
                format!(
                    "layer {layer}: the page at token {start} is missing, only all of its \
                         tokens together can put it back"
                )
            })?;
            self.write_page(number, page)?;
            has_refilled = true;
        }
        Ok(has_refilled)
    }

    fn write_page(&mut self, number: usize, rows: &[u8]) -> Result<()> {
        let start = self.start(number);
        let place = PagePlace::new(&self.manifest, self.layer, start)?;
        let page = pack_page(&place, rows, self.geometry().page_tokens())?;
        publish(&self.directory, &format_page(start), &page)?;
        self.tail.take_if(|tail| tail.number == number);
        remove(&self.directory.join(format_tail(start)))?;
        self.map_new_page(number)
    }

    fn append_to_tail(&mut self, number: usize, rows: &[u8], fills: bool) -> Result<()> {
        let expected = self.end * self.row_bytes() % (self.page_tokens() * self.row_bytes());
        let tail = match self.tail.take() {
            Some(tail) => tail,
            None => Tail::open(number, self.directory.join(format_tail(self.start(number))))?,
        };
        if (tail.number, tail.bytes) != (number, expected) {
            let path = tail.path.display();
            return Err(format!("{path} changed: another program writes to the sequence").into());
        }
        let tail = self.tail.insert(tail);
        (&tail.file).write_all(rows).map_err(about(&tail.path))?;
        tail.bytes += rows.len();
        if fills {
            // The mount has made a page of it and opened the next tail.
            self.tail = None;
            self.map_new_page(number)?;
        }
        Ok(())
    }

    fn append_in_memory(&mut self, number: usize, rows: &[u8]) -> Result<()> {
        if self.open != Some(number) {
            let tail = self.tail.as_ref().filter(|tail| tail.number == number);
            self.rows = tail.map_or(Ok(Vec::new()), |tail| tail.read(tail.bytes))?;
            self.open = Some(number);
        }
        self.rows.extend_from_slice(rows);
        Ok(())
    }

    /// The rows are here at once, and in the file when `writer` comes to them.
    fn append_later(
        &mut self, number: usize, rows: &[u8], fills: bool, writer: &mut WriteBack,
    ) -> Result<()> {
        self.append_in_memory(number, rows)?;
        writer.append(self.layer, rows)?;
        if fills {
            // The mount makes a page of it when the last row is there.
            writer.flush()?;
            (self.tail, self.open) = (None, None);
            self.map_new_page(number)?;
        }
        Ok(())
    }

    fn replace_tail(&mut self, number: usize, rows: &[u8]) -> Result<()> {
        let name = format_tail(self.start(number));
        publish(&self.directory, &name, rows)?;
        self.tail = Some(Tail::open(number, self.directory.join(name))?);
        Ok(())
    }

    fn map_new_page(&mut self, number: usize) -> Result<()> {
        let path = self.directory.join(format_page(self.start(number)));
        let (page, file) = MappedPage::open(&path, self.geometry())?;
        self.pages.insert(number, page);
        self.unsynced.push(file);
        Ok(())
    }

    fn remove_page(&mut self, number: usize) -> Result<()> {
        remove(&self.directory.join(format_page(self.start(number))))?;
        self.pages.remove(&number);
        Ok(())
    }

    /// The tokens of a page, or of the tail if it has this number.
    fn tokens_of(&self, number: usize) -> usize {
        let tail = self.tail.as_ref().filter(|tail| tail.number == number);
        let in_tail = tail.map_or(0, |tail| tail.bytes / self.row_bytes());
        self.pages.get(&number).map_or(in_tail, MappedPage::tokens)
    }

    /// The page that a token would be in, and how many of its tokens come before.
    fn split(&self, token: usize) -> (usize, usize) {
        (token / self.page_tokens(), token % self.page_tokens())
    }

    fn start(&self, number: usize) -> TokenStart {
        TokenStart((number * self.page_tokens()) as u64)
    }

    fn geometry(&self) -> &Geometry {
        self.manifest.geometry()
    }

    fn page_tokens(&self) -> usize {
        self.geometry().page_tokens() as usize
    }

    fn row_bytes(&self) -> usize {
        let row = self.geometry().num_kv_heads() * self.geometry().head_dim();
        2 * row as usize * size_of::<f16>()
    }
}

impl Tail {
    /// Opens a tail, or makes it.
    fn open(number: usize, path: PathBuf) -> Result<Self> {
        let mut options = OpenOptions::new();
        let options = options.read(true).append(true).create(true);
        let file = options.open(&path).map_err(about(&path))?;
        let bytes = usize::try_from(file.metadata().map_err(about(&path))?.len())?;
        Ok(Self { number, path, file, bytes })
    }

    /// Its first bytes.
    fn read(&self, bytes: usize) -> Result<Vec<u8>> {
        let mut rows = vec![0; bytes];
        self.file.read_exact_at(&mut rows, 0).map_err(about(&self.path))?;
        Ok(rows)
    }
}
