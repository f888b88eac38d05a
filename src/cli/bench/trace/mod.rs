//! `kvfs bench trace`: what stays, replayed on traces of real requests.
//!
//! A trace says which blocks of a prompt each request used, by the hash of everything up to their end
//! (the public Mooncake format). It goes through the policy of the tiers, with bytes that exist in its
//! books only, and through others that are known. Each plays one tier of a given room: a block that
//! is seen for the first time was just written and comes in; any later use finds it or does not.
//! With `--real` it goes through a mount instead (`real`).

mod arguments;
mod chain;
mod hints;
mod plot;
mod policies;
mod read;
mod real;
mod replay;
mod report;
mod what_if;

use std::io::Write;

pub use arguments::TraceArguments;

use super::{BenchArguments, figure, machine, note, print};
use hints::Hints;
use read::Trace;
use replay::{Outcome, replay};

use crate::cli::history::shown;

/// What every policy made of a trace in one room.
struct Room {
    /// Of the different blocks, in per cent.
    share: f64,
    blocks: usize,
    outcomes: Vec<Outcome>,
}

/// What each policy makes of a trace, or what hints make of that of the tiers.
fn outcomes(trace: &Trace, room: usize, with_hints: bool) -> Vec<Outcome> {
    if !with_hints {
        let none = Hints::none();
        let all = policies::all(trace, room).into_iter();
        return all.map(|policy| replay(trace, policy, &none)).collect();
    }
    let hinted = policies::hinted(trace, room).into_iter();
    hinted.map(|(policy, hints)| replay(trace, policy, &hints)).collect()
}

/// Replays, and prints. The error is one line.
pub(super) fn run(arguments: &BenchArguments) -> Result<(), String> {
    let options = &arguments.trace;
    if options.files.is_empty() {
        return Err("`kvfs bench trace` needs a file with a trace".to_owned());
    }
    if options.real.real {
        return real::run(arguments);
    }
    let (mut replayed, mut told) = (Vec::new(), String::new());
    for path in &options.files {
        note(&format!("reading {}", shown(path)));
        let trace = Trace::read(path, usize::MAX)?;
        let rooms = options.rooms(trace.distinct)?;
        if options.what_if {
            told += &what_if::table(&trace, &rooms);
            continue;
        }
        let mut found = Vec::new();
        for (share, blocks) in rooms {
            note(&format!("{}, room for {blocks} of {} blocks", trace.name, trace.distinct));
            let outcomes = outcomes(&trace, blocks, options.hints);
            found.push(Room { share, blocks, outcomes });
        }
        replayed.push((trace, found));
    }
    if options.what_if {
        return write(&told);
    }
    if let Some(path) = &options.plot {
        let image = plot::draw(&replayed);
        std::fs::write(path, image).map_err(super::measure::at(path))?;
    }
    let figures: Vec<_> =
        replayed.iter().flat_map(|(trace, rooms)| report::figures(trace, rooms)).collect();
    let machine = || machine::describe(&std::env::current_dir().unwrap_or_default(), "");
    if let Some(path) = &arguments.markdown {
        let table = figure::markdown(&machine(), &figures);
        std::fs::write(path, table).map_err(super::measure::at(path))?;
    }
    if arguments.json {
        return print(true, &machine(), &figures);
    }
    let text: String =
        replayed.iter().map(|(trace, rooms)| report::table(trace, rooms, options)).collect();
    write(&text)
}

fn write(text: &str) -> Result<(), String> {
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(format!("standard output cannot be written: {error}"))
        }
        _ => Ok(()),
    }
}
