//! Writes sequences as an engine does, and keeps in plain lists what a correct answer follows from.

use std::path::PathBuf;

use kvfs::page::{Layer, TokenStart, names};

use crate::common::sys::{open, rename, write, write_and_close};
use crate::common::{Model, Mount};

pub(crate) const APPEND: i32 = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;

/// A sequence as it should be.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) name: String,
    pub(crate) tokens: Vec<u32>,
    /// Rows of each layer, from the first on without a hole.
    pub(crate) rows: Vec<u64>,
}

impl Sequence {
    pub(crate) fn new(model: &Model, name: &str) -> Sequence {
        let layers = model.manifest.geometry().num_layers() as usize;
        Sequence { name: name.to_owned(), tokens: Vec::new(), rows: vec![0; layers] }
    }

    /// Tokens that it shares with a prompt and has rows of.
    pub(crate) fn shares(&self, prompt: &[u32]) -> u64 {
        let same = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count() as u64;
        self.rows.iter().fold(same, |tokens, rows| tokens.min(*rows))
    }

    /// Appends tokens and the rows of every layer.
    pub(crate) fn append(&mut self, mount: &Mount, model: &Model, tokens: &[u32]) {
        self.append_tokens(mount, model, tokens);
        for layer in 0..self.rows.len() {
            self.append_rows(mount, model, layer, tokens.len() as u64);
        }
    }

    pub(crate) fn append_tokens(&mut self, mount: &Mount, model: &Model, tokens: &[u32]) {
        let file = open(model.tokens_path(mount, &self.name), APPEND).unwrap();
        write(&file, &bytes(tokens)).unwrap();
        self.tokens.extend(tokens);
    }

    /// Appends rows to a layer, page by page. They depend on the tokens before them only, as real
    /// ones do, so equal beginnings have equal pages.
    pub(crate) fn append_rows(&mut self, mount: &Mount, model: &Model, layer: usize, count: u64) {
        let page_tokens = u64::from(model.page_tokens());
        let number = u32::try_from(layer).unwrap();
        let end = self.rows[layer] + count;
        while self.rows[layer] < end {
            let at = self.rows[layer];
            let start = at / page_tokens * page_tokens;
            let until = end.min(start + page_tokens);
            let mut rows = Vec::new();
            for token in at..until {
                let known = usize::try_from(token).unwrap() + 1;
                rows.extend(model.layer_rows(number, hash(&self.tokens[..known], number), 1));
            }
            let path = model.tail_path(mount, &self.name, number, start);
            write(&open(path, APPEND).unwrap(), &rows).unwrap();
            self.rows[layer] = until;
        }
    }

    /// Removes the last page or tail of a layer.
    pub(crate) fn drop_last(&mut self, mount: &Mount, model: &Model, layer: usize) {
        let page_tokens = u64::from(model.page_tokens());
        let Some(last) = self.rows[layer].checked_sub(1) else { return };
        let number = u32::try_from(layer).unwrap();
        let start = last / page_tokens * page_tokens;
        let page = model.page_path(mount, &self.name, number, start);
        let tail = model.tail_path(mount, &self.name, number, start);
        std::fs::remove_file(if page.exists() { page } else { tail }).unwrap();
        self.rows[layer] = start;
    }

    /// Replaces the token file, by a rename or in place.
    pub(crate) fn replace_tokens(
        &mut self, mount: &Mount, model: &Model, tokens: Vec<u32>, in_place: bool,
    ) {
        let path = model.tokens_path(mount, &self.name);
        if in_place {
            let file = open(&path, libc::O_WRONLY | libc::O_TRUNC).unwrap();
            write(&file, &bytes(&tokens)).unwrap();
        } else {
            let temporary = path.with_extension("tmp");
            write_and_close(&temporary, &bytes(&tokens)).unwrap();
            rename(temporary, path).unwrap();
        }
        self.tokens = tokens;
    }

    /// What `cp -al` makes of it.
    pub(crate) fn fork(&self, mount: &Mount, model: &Model, name: &str) -> Sequence {
        let (from, to) = (model.sequence(mount, &self.name), model.sequence(mount, name));
        std::fs::create_dir(&to).unwrap();
        std::fs::hard_link(from.join(names::TOKENS), to.join(names::TOKENS)).unwrap();
        for layer in 0..self.rows.len() {
            let layer = names::format_layer(Layer(u32::try_from(layer).unwrap()));
            std::fs::create_dir_all(to.join(&layer)).unwrap();
            let Ok(entries) = std::fs::read_dir(from.join(&layer)) else { continue };
            for entry in entries {
                let entry = entry.unwrap();
                let target = to.join(&layer).join(entry.file_name());
                std::fs::hard_link(entry.path(), target).unwrap();
            }
        }
        Sequence { name: name.to_owned(), ..self.clone() }
    }

    pub(crate) fn page(&self, mount: &Mount, model: &Model, layer: u32, number: u64) -> PathBuf {
        let start = TokenStart(number * u64::from(model.page_tokens()));
        let layer = names::format_layer(Layer(layer));
        model.sequence(mount, &self.name).join(layer).join(names::format_page(start))
    }
}

pub(crate) fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

fn hash(tokens: &[u32], layer: u32) -> u64 {
    tokens.iter().fold(u64::from(layer) + 1, |hash, token| {
        (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
    })
}
