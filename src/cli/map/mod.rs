//! `kvfs map`: where the pages of a sequence or a model are, as a picture.
//!
//! Nothing is opened. Each layer's directory is asked for its pages in parts of some hundred (`gather`); what
//! comes back is folded into cells (`grid`), which are drawn as text, SVG or JSON (`text`, `svg`, `json`), or for the
//! daemon's page, whose directories are asked without the kernel (`cells`, `tree`).

mod cells;
mod gather;
mod grid;
mod json;
mod page;
mod svg;
mod text;
mod tree;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use kvfs_os::mountinfo;

use super::history::shown;
use super::new_file::{NewFile, begin, explain};
use super::output::{Failure, Outcome, Report};
use super::status;
use super::style::Style;
use grid::Grid;
use tree::Kernel;

pub(super) use tree::{Inside, Tree};

const MAP_HELP: &str = "\
Of a sequence the rows are layers, of a model sequences, those used last first; columns are ranges of tokens. Where
there are too many, neighbours share a cell: it shows damage if any page has it, else what most of its pages are.
Nothing is fetched or opened. Colours are left out where NO_COLOR is set.

Example: kvfs map --svg chat.svg /mnt/kv/models/llama/sequences/chat-42";

/// `kvfs map`.
#[derive(Debug, Args)]
#[command(after_help = MAP_HELP)]
pub(crate) struct MapArguments {
    /// Print JSON, with each page
    #[arg(long, conflicts_with = "svg")]
    pub json: bool,
    /// Write the map to FILE as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Replace FILE if it is there
    #[arg(long, requires = "svg")]
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
    let file = arguments.svg.as_deref().map(|file| begin(file, arguments.force)).transpose()?;
    let subject = gather::gather(&Kernel, &path)?;
    if arguments.json {
        return Ok(Report::json(&json::of(&subject)));
    }
    let now = now_seconds();
    let grid = Grid::of(&subject);
    if let (Some(new), Some(name)) = (file, arguments.svg.as_deref()) {
        write(new, &svg::of(&subject, &grid, now)).map_err(|error| explain(name, &error))?;
        return Ok(Report::text(format!("wrote {}\n", shown(name))));
    }
    Ok(Report::text(text::of(&subject, &grid, now, Style::of_output())))
}

/// The map as the daemon's page draws it.
pub(super) fn for_page(tree: &impl Tree, path: &Path) -> Result<serde_json::Value, Failure> {
    let subject = gather::gather(tree, path)?;
    Ok(cells::of(&subject, &Grid::of(&subject), now_seconds()))
}

fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn write(new: NewFile, text: &str) -> io::Result<()> {
    new.file().write_all(text.as_bytes())?;
    new.publish()
}
