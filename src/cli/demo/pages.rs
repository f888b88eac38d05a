//! The cache of a sequence as an engine keeps it: whole pages, each written under a temporary name and renamed.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::toy::{Cache, HEADS, LAYERS};
use crate::page::{Layer, Manifest, PagePlace, PageView, TokenStart, names, pack_page};

/// Tokens of a page.
pub(super) const PAGE_TOKENS: usize = 128;

/// K and V of one head of one token, or of several heads in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    pub(super) k: &'a [u8],
    pub(super) v: &'a [u8],
}

/// The directory of a model in the mount.
#[derive(Debug)]
pub(super) struct Pages {
    model: PathBuf,
    manifest: Manifest,
}

fn at(path: &Path) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{}: {error}", path.display())
}

impl Pages {
    /// Reads the manifest.
    pub(super) fn open(model: PathBuf) -> Result<Pages, String> {
        let path = model.join(names::MANIFEST);
        let json = fs::read(&path).map_err(at(&path))?;
        let manifest = Manifest::parse(&json).map_err(|error| error.to_string())?;
        Ok(Pages { model, manifest })
    }

    fn sequence(&self, name: &str) -> PathBuf {
        self.model.join(names::SEQUENCES).join(name)
    }

    fn page(&self, name: &str, layer: usize, start: usize) -> Result<(PathBuf, PagePlace), String> {
        let layer = Layer(u32::try_from(layer).map_err(|error| error.to_string())?);
        let start = TokenStart(start as u64);
        let directory = self.sequence(name).join(names::format_layer(layer));
        let place = PagePlace::new(&self.manifest, layer, start);
        let place = place.map_err(|error| error.to_string())?;
        Ok((directory.join(names::format_page(start)), place))
    }

    /// Writes the pages from a token on, and then the ids, which say that the rows are there. Gives the bytes of the
    /// pages.
    pub(super) fn write(
        &self, name: &str, cache: &Cache, prompt: &[u8], from: usize,
    ) -> Result<u64, String> {
        let mut written = 0;
        for layer in 0..LAYERS {
            for start in (from..prompt.len()).step_by(PAGE_TOKENS) {
                let (path, place) = self.page(name, layer, start)?;
                let rows = cache.rows(layer, start, PAGE_TOKENS);
                let count = u32::try_from(PAGE_TOKENS).map_err(|error| error.to_string())?;
                let page = pack_page(&place, &rows, count).map_err(|error| error.to_string())?;
                let directory = path.parent().unwrap_or(&self.model);
                fs::create_dir_all(directory).map_err(at(directory))?;
                let temporary = path.with_extension("tmp");
                fs::write(&temporary, &page).map_err(at(&temporary))?;
                publish(&temporary, &path)?;
                written += page.len() as u64;
            }
        }
        let path = self.sequence(name).join(names::TOKENS);
        let ids = token_ids(&prompt[from..]);
        let file = File::options().create(true).append(true).open(&path);
        file.and_then(|mut file| file.write_all(&ids)).map_err(at(&path))?;
        Ok(written)
    }

    /// Reads the pages of the first tokens of a sequence, and tells how many bytes that were.
    pub(super) fn read(&self, name: &str, tokens: usize) -> Result<(Cache, u64), String> {
        let mut cache = Cache::default();
        let mut read = 0;
        for layer in 0..LAYERS {
            for start in (0..tokens).step_by(PAGE_TOKENS) {
                let (path, place) = self.page(name, layer, start)?;
                let file = fs::read(&path).map_err(at(&path))?;
                let page = PageView::parse(&file, place.geometry());
                let page = page.map_err(|error| format!("{}: {error}", path.display()))?;
                for token in 0..page.tokens() {
                    for head in 0..HEADS {
                        let head = u32::try_from(head).map_err(|error| error.to_string())?;
                        let (k, v) = (page.k_row(head, token), page.v_row(head, token));
                        cache.extend(layer, Row { k, v });
                    }
                }
                read += file.len() as u64;
            }
        }
        Ok((cache, read))
    }
}

#[expect(clippy::disallowed_methods, reason = "an engine publishes its page by a rename")]
fn publish(temporary: &Path, path: &Path) -> Result<(), String> {
    fs::rename(temporary, path).map_err(at(path))
}

/// Ids as a file `tokens` has them.
pub(super) fn token_ids(prompt: &[u8]) -> Vec<u8> {
    prompt.iter().flat_map(|token| u32::from(*token).to_le_bytes()).collect()
}
