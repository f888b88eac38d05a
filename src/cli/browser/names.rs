//! Paths that a browser may choose from for a map.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cli::map::Tree;
use crate::cli::subject::if_there;
use crate::page::names::{SEQUENCES, is_unfinished};

/// More than anybody looks through; the others are written by hand.
const PATHS_MAX: usize = 500;

/// Models and their sequences, and whether these are all. A name that is no text cannot be asked for.
pub(super) fn of(tree: &impl Tree) -> Result<Value, String> {
    let mut paths = Vec::new();
    let is_all = walk(tree, &mut paths).map_err(|error| format!("models: {error}"))?;
    Ok(json!({ "paths": paths, "is_all": is_all }))
}

fn walk(tree: &impl Tree, paths: &mut Vec<PathBuf>) -> io::Result<bool> {
    for model in below(tree, Path::new("models"))? {
        let sequences = below(tree, &model.join(SEQUENCES))?;
        for path in std::iter::once(model).chain(sequences) {
            if paths.len() == PATHS_MAX {
                return Ok(false);
            }
            paths.push(path);
        }
    }
    Ok(true)
}

/// Directories that may be entered and have a name in text.
fn below(tree: &impl Tree, directory: &Path) -> io::Result<Vec<PathBuf>> {
    let names = match if_there(tree.directories(directory)) {
        // Of those who may not look into it.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => None,
        outcome => outcome?,
    };
    let mut paths = Vec::new();
    for name in names.unwrap_or_default() {
        if name.to_str().is_some_and(|name| !is_unfinished(name.as_bytes())) {
            paths.push(directory.join(name));
        }
    }
    paths.sort();
    Ok(paths)
}
