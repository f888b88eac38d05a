//! `kvfs map`: where the pages of a sequence or a model are, as a picture.
//!
//! Nothing is opened. Each layer's directory is asked for its pages in parts of some hundred (`gather`); what
//! comes back is folded into cells (`grid`), which are drawn as text, SVG, PNG or JSON (`text`, `svg`, `png`, `json`), or for the
//! daemon's page, whose directories are asked without the kernel (`cells`, `tree`).

mod cells;
mod gather;
mod grid;
mod json;
mod legend;
mod page;
mod png;
mod svg;
mod text;
mod tree;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use kvfs_os::mountinfo;

use super::history::shown;
use super::new_file::{begin, explain};
use super::output::{Failure, Outcome, Report};
use super::picture;
use super::status;
use super::style::Style;
use grid::Grid;
use page::Page;
use tree::Kernel;

pub(super) use page::Place;
pub(super) use tree::{Inside, Tree};

const MAP_HELP: &str = "\
Of a sequence the rows are layers, of a model sequences, those used last first; columns are ranges of tokens. Where \
there are too many, neighbours share a cell: it shows damage if any page has it, else what most of its pages are. \
Nothing is fetched or opened. Colours are left out where NO_COLOR is set.

Example: kvfs map --svg chat.svg /mnt/kv/models/llama/sequences/chat-42";

/// `kvfs map`.
#[derive(Debug, Args)]
#[command(after_help = MAP_HELP)]
pub(crate) struct MapArguments {
    /// Print JSON, with each page
    #[arg(long, conflicts_with = "picture")]
    pub json: bool,
    /// Write the map to FILE as a picture for documents, in which letters are letters
    #[arg(long, value_name = "FILE", group = "picture")]
    pub svg: Option<PathBuf>,
    /// Write the map to FILE as a picture of pixels
    #[arg(long, value_name = "FILE", group = "picture", conflicts_with = "svg")]
    pub png: Option<PathBuf>,
    /// Replace FILE if it is there
    #[arg(long, requires = "picture")]
    pub force: bool,
    /// MOUNTPOINT/models/NAME, or MOUNTPOINT/models/NAME/sequences/SEQUENCE
    pub path: PathBuf,
}

/// Draws the map.
pub(crate) fn run(arguments: &MapArguments) -> Outcome {
    let (mount, path) = mountinfo::kvfs_above(&arguments.path).map_err(Failure::Failed)?;
    // Says so where the daemon is gone or stuck.
    status::read(&mount.mountpoint)?;
    // Refused before anything is asked for.
    let name = arguments.svg.as_deref().or(arguments.png.as_deref());
    let file = name.map(|name| begin(name, arguments.force)).transpose()?;
    let subject = gather::gather(&Kernel, &path)?;
    if arguments.json {
        return Ok(Report::json(&json::of(&subject)));
    }
    let now = now_seconds();
    let grid = Grid::of(&subject);
    if let (Some(new), Some(name)) = (file, name) {
        let written = if arguments.png.is_some() {
            picture::write(&png::of(&subject, &grid, now), new.file())
        } else {
            new.file().write_all(svg::of(&subject, &grid, now).as_bytes())
        };
        written.and_then(|()| new.publish()).map_err(|error| explain(name, &error))?;
        return Ok(Report::text(format!("wrote {}\n", shown(name))));
    }
    Ok(Report::text(text::of(&subject, &grid, now, Style::of_output())))
}

/// The map as the daemon's page draws it.
pub(super) fn for_page(tree: &impl Tree, path: &Path) -> Result<serde_json::Value, Failure> {
    let subject = gather::gather(tree, path)?;
    Ok(cells::of(&subject, &Grid::of(&subject), now_seconds()))
}

/// The pages of a layer, as its mount tells them; nothing of a layer that is in no mount.
pub(super) fn layer_pages(layer: &Path) -> io::Result<Option<Vec<Page>>> {
    match gather::pages(&Kernel, layer) {
        Ok(pages) => Ok(Some(pages)),
        Err(error)
            if error.kind() == io::ErrorKind::Unsupported
                || error.raw_os_error() == Some(libc::EOPNOTSUPP) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
