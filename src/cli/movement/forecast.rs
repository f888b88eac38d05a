//! `--dry-run` of `kvfs promote` and `kvfs evict`: which files would move, from where to where, and how long that
//! takes. The mount is asked where they are, and for nothing else.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Candidate, PIN, TIER, Todo, can_move, unmoved};
use crate::cli::history::shown;
use crate::cli::output::{EXIT_FAILED, EXIT_OK, Outcome, Report, bytes};
use crate::cli::plan::{Link, Planned, Rate, Source, links};
use crate::page::names::MANIFEST;
use crate::sys;
use crate::tier::counters::Tier;

/// What somebody would ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Promote(Tier),
    Evict(Tier),
}

impl Request {
    fn to(self) -> Tier {
        let (Request::Promote(to) | Request::Evict(to)) = self;
        to
    }

    /// Whether a file is where it is wanted.
    fn is_met_by(self, source: Source) -> bool {
        match self {
            // Out of memory: where else it is does not matter.
            Request::Evict(Tier::Ssd) => source != Source::Tier(Tier::Ram),
            Request::Promote(to) | Request::Evict(to) => source == Source::Tier(to),
        }
    }
}

/// What would come of a request.
#[derive(Debug, Default)]
struct Forecast {
    moving: Vec<Planned>,
    there: usize,
    staying: Vec<(PathBuf, String)>,
}

/// Tells what would come of it.
pub(super) fn tell(todo: &Todo, request: Request, is_json: bool) -> Outcome {
    let mut forecast = Forecast::default();
    for file in &todo.files {
        forecast.add(file, request, &todo.status);
    }
    if let Request::Promote(_) = request
        && forecast.moving.is_empty()
        && forecast.staying.is_empty()
    {
        todo.check_can_promote()?;
    }
    let links = forecast.links(request, &todo.status);
    let text = forecast.to_text(request, &links);
    let exit = if forecast.staying.is_empty() { EXIT_OK } else { EXIT_FAILED };
    Ok(Report { exit, ..Report::answer(is_json, &forecast.to_json(request, &links), text) })
}

impl Forecast {
    fn add(&mut self, file: &Candidate, request: Request, status: &str) {
        let planned = match Planned::of(&file.path, file.bytes) {
            Ok(planned) => planned,
            Err(error) => return self.staying.push((file.path.clone(), error.to_string())),
        };
        if let Some(why) = hindrance(&planned, request, status) {
            self.staying.push((planned.path, why.to_owned()));
        } else if request.is_met_by(planned.source) {
            self.there += 1;
        } else {
            self.moving.push(planned);
        }
    }

    /// What is promoted is read; what is evicted is written.
    fn links(&self, request: Request, status: &str) -> Vec<Link> {
        let mut links = match request {
            Request::Promote(_) => links(&self.moving, status),
            Request::Evict(to) => {
                let link = |source| {
                    Link::new(source, &self.moving, Rate::written_to(to), |file| file.stored_bytes)
                };
                Source::ALL.map(link).into()
            }
        };
        links.retain(|link| link.files > 0);
        links
    }

    fn bytes(&self) -> u64 {
        self.moving.iter().map(|file| file.bytes).sum()
    }

    fn to_text(&self, request: Request, links: &[Link]) -> String {
        let to = request.to().name();
        let moves = self.moving.iter().map(|file| {
            let (path, from) = (shown(&file.path), file.source.name());
            format!("{path}: {}, {from} to {to}\n", bytes(file.bytes))
        });
        let stays = self.staying.iter().map(|(path, why)| format!("{}: {why}\n", shown(path)));
        let mut text: String = moves.chain(stays).chain(links.iter().map(Link::line)).collect();
        let word = match request {
            Request::Promote(_) => "promoted",
            Request::Evict(_) => "evicted",
        };
        let files = if self.moving.len() == 1 { "file" } else { "files" };
        // Writing to a String cannot fail.
        let _ =
            write!(text, "would be {word}: {} {files}, {}", self.moving.len(), bytes(self.bytes()));
        for (count, what) in [(self.there, "are there already"), (self.staying.len(), "stay")] {
            if count > 0 {
                let _ = write!(text, ", {count} {what}");
            }
        }
        let _ = writeln!(text, "; expected: {:.3} s", seconds(links));
        text
    }

    fn to_json(&self, request: Request, links: &[Link]) -> Value {
        let to = request.to().name();
        let file = |file: &Planned| {
            let (path, from) = (file.path.display().to_string(), file.source.name());
            json!({ "path": path, "from": from, "to": to, "bytes": file.bytes })
        };
        let failed = self.staying.iter().map(|(path, why)| unmoved(path, why));
        json!({
            "dry_run": true,
            "to": to,
            "moved_files": self.moving.len(),
            "moved_bytes": self.bytes(),
            "there_files": self.there,
            "failed": failed.collect::<Vec<_>>(),
            "seconds": seconds(links),
            "links": links.iter().map(Link::to_json).collect::<Vec<_>>(),
            "files": self.moving.iter().map(file).collect::<Vec<_>>(),
        })
    }
}

fn seconds(links: &[Link]) -> f64 {
    links.iter().map(Link::seconds).fold(0.0, std::ops::Add::add)
}

/// Why a file would stay, as far as that can be known before it is asked for.
fn hindrance(file: &Planned, request: Request, status: &str) -> Option<&'static str> {
    let is_met = request.is_met_by(file.source);
    if request == Request::Evict(Tier::Ssd) && is_met {
        return None;
    }
    let is_pinned =
        || matches!(sys::extended_attribute(&file.path, PIN), Ok(Some(value)) if value == b"1");
    let has_tier = matches!(sys::extended_attribute(&file.path, TIER), Ok(Some(_)));
    let is_kept_here = matches!(request, Request::Evict(_)) && is_manifest(&file.path);
    if !has_tier || !can_move(&file.path) || is_kept_here {
        Some("files of this kind do not move, or not there")
    } else if is_met {
        None
    } else if file.source == Source::Lost {
        Some("no copy of it is left")
    } else if let Some(why) = file.source.hindrance(status) {
        Some(why)
    } else if request == Request::Evict(Tier::Remote) && is_pinned() {
        Some("it is pinned (user.kvfs.pin)")
    } else {
        None
    }
}

/// Of a model: another file of that name moves.
fn is_manifest(path: &Path) -> bool {
    let models = path.ancestors().nth(2).and_then(Path::file_name);
    path.file_name() == Some(MANIFEST.as_ref()) && models == Some("models".as_ref())
}
