//! `kvfs slots watch`: what a server has computed is kept without anybody asking for it.
//!
//! **What it sees.** `GET /slots` tells of each slot whether it works, the number of its last task and how many
//! tokens it has (`state`); `GET /props` a word that the server draws at random when it starts, and whether it
//! sleeps. Both are asked every `--interval`. A slot has changed if one of its two numbers has (`seen`). The
//! server is another one if that word is another, or a slot has forgotten its tasks, or nobody listened.
//!
//! **What is saved when.** A slot that has changed and does not work, in the same way as by `kvfs slots save`.
//! Saving a slot stops the server for as long as it writes, so a slot rests for nine times as long as that took:
//! at most a tenth of the time goes into it. What failed is tried again after a time that doubles up to ten minutes.
//! When the command is told to end, what has changed is saved if that takes no longer than a moment.
//!
//! **What is restored when.** When the server is new, the slots that nobody has used get the latest conversations
//! that are in no slot yet, as by `kvfs slots restore`. From then on the server itself finds, by the beginning of a
//! prompt, which of its slots has most of it. A prompt goes from its client to the server, and nobody else sees it
//! before it is computed: a conversation that is in no slot comes back only if somebody asks for it with
//! `kvfs slots restore --prompt`, or when the server starts.
//!
//! **What may go wrong.** A server that is gone, hangs, or talks nonsense, a mount that is gone, a directory that is not
//! the server's: each is one line when it begins, and the watch goes on. A mount is asked in a child process before it
//! is touched (`probe`), and a server is asked by a thread, while the main one waits for signals: whatever hangs, the
//! command ends in time, and removes what it exchanges with the server. What a server writes there after that goes
//! when the next one starts. Two that watch one server would do everything twice; the second one ends.

mod only;
mod seen;
mod told;
mod worker;

use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use clap::Args;

use super::ServerArguments;
use super::server::Server;
use crate::cli::duration;
use crate::cli::interrupt::{Ended, Interrupts};
use crate::cli::output::{Failure, Outcome, Report, complain};
use only::Only;
use worker::Worker;

/// A signal ends the command after so long at the latest, with what was being done left undone.
const GRACE: Duration = Duration::from_millis(1500);
/// A request that was broken off then is told of.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// For so long what was exchanged with the server may take to be removed, where the directory hangs.
const REMOVAL_MAX: Duration = Duration::from_millis(200);
/// How often somebody looks whether a thread has ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Nobody waits for a signal for longer before looking whether there is still somebody at work.
const WAIT: Duration = Duration::from_secs(1);
const INTERVALS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(3600)];

const WATCH_HELP: &str = "\
A conversation is saved when its turn has ended, at the next look at the server, and not while its \
slot works. It becomes a sequence that is called by its first words, the time, the model and a hash \
of its tokens; one that went on takes the place of what it was. How many are kept is a matter of the \
mount's limits (kvfs quota). When the server starts, the latest conversations go into its slots, where \
it finds them by the beginning of a prompt; it is not told of prompts itself, so a conversation that \
is in no slot is computed, unless kvfs slots restore --prompt brings it before.

Example: kvfs slots watch --directory /mnt/kv/files/slots /mnt/kv/models/llama";

/// `kvfs slots watch`.
#[derive(Clone, Debug, Args)]
#[command(after_help = WATCH_HELP)]
pub(crate) struct WatchArguments {
    #[command(flatten)]
    pub server: ServerArguments,
    /// How often the server is asked what its slots have, from 100ms to 1h
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    pub interval: Duration,
    /// Map the pages of what is restored instead of copying them: for a server with the ggml backend and
    /// this model as its `KVFS_MODEL`
    #[arg(long)]
    pub mapped: bool,
    /// The model's directory, `MOUNT/models/NAME`
    pub model: PathBuf,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration::parse(text)?;
    let [least, most] = INTERVALS;
    if interval < least || interval > most {
        return Err("an interval is from 100ms to 1h".to_owned());
    }
    Ok(interval)
}

/// Watches until a signal.
pub(super) fn run(arguments: &WatchArguments) -> Outcome {
    let absolute = |path: &PathBuf| {
        std::path::absolute(path)
            .map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))
    };
    let mut arguments = arguments.clone();
    arguments.model = absolute(&arguments.model)?;
    arguments.server.directory = absolute(&arguments.server.directory)?;
    // Nobody can unmount what is somebody's current directory.
    std::env::set_current_dir("/").map_err(Failure::failed)?;
    let interrupts = Interrupts::hold().map_err(Failure::failed)?;
    let only = Only::claim(&arguments.server.server)?;
    let server = Server::new(&arguments.server, only.file_name())?;
    let (stop, stopped) = channel();
    let exchanged = server.exchanged();
    let mut worker = Worker::new(arguments, server, only.file_prefix());
    let thread = Builder::new().name("kvfs-watch".to_owned());
    let thread = thread.spawn(move || worker.run(&stopped, GRACE)).map_err(Failure::failed)?;
    while !thread.is_finished() {
        let ended = interrupts.wait(WAIT, &std::io::stdout()).map_err(Failure::failed)?;
        if ended == Ended::Stopped {
            break;
        }
    }
    drop(stop);
    if is_finished_within(&thread, GRACE + LAST_WORDS) {
        let ended = thread.join();
        return ended
            .map(|()| Report::default())
            .map_err(|_| Failure::failed("the watch broke off"));
    }
    complain(
        "kvfs",
        "ended before the server or the mount had answered: what changed last may be lost",
    );
    let removal = Builder::new().spawn(move || std::fs::remove_file(exchanged));
    if let Ok(removal) = removal {
        is_finished_within(&removal, REMOVAL_MAX);
    }
    Ok(Report::default())
}

fn is_finished_within<T>(thread: &JoinHandle<T>, time: Duration) -> bool {
    let ends = Instant::now() + time;
    while !thread.is_finished() && Instant::now() < ends {
        sleep(LOOK_INTERVAL);
    }
    thread.is_finished()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_bounds() {
        for text in ["100ms", "2s", "1h"] {
            assert!(interval(text).is_ok(), "{text}");
        }
        for text in ["99ms", "0", "61m", "", "soon"] {
            assert!(interval(text).is_err(), "{text}");
        }
    }
}
