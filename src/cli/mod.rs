//! The command line: what a person, a script, mount(8) and umount(8) call.
//!
//! One binary plays three roles, told apart by its name and first argument (`role`): `kvfs`
//! with subcommands, the mount helper (`mount.kvfs`) and the umount helper (`umount.fuse.kvfs`).
//! A command takes validated arguments and gives back the text to print and an exit code
//! (`output`), or the one line that says what is wrong, where, and what to do about it.
//!
//! Whatever may hang (a mount whose daemon is stuck) is asked in a child process with a deadline
//! (`probe`); nothing is ever concluded from silence.

mod answering;
mod arguments;
pub mod bench;
mod block;
mod browser;
mod busy;
mod config;
mod config_command;
mod connection;
mod consent;
mod convert;
mod create;
mod daemon;
mod demo;
mod diff;
mod doctor;
mod duration;
mod explain;
mod fsck;
mod gc;
mod helper;
mod hint;
mod history;
mod inspect;
mod interrupt;
mod leaving;
mod limits;
mod locks;
mod logging;
mod manual;
mod map;
mod markup;
mod metrics;
mod model;
mod mount;
mod mount_arguments;
mod movement;
mod nesting;
mod new_file;
mod options;
mod order;
mod output;
mod page_values;
mod picture;
mod plan;
mod prefix;
mod preflight;
mod probe;
mod process;
mod progress;
mod quota;
mod remote;
mod remote_key;
mod role;
mod scrub;
mod seq;
mod series;
mod service;
mod settings;
mod size;
mod slots;
mod stale;
mod status;
mod stop;
mod style;
mod subject;
mod summary;
mod sync;
mod take_over;
mod top;
mod umount;
mod unmount;
mod upgrade;
mod what_if;

use std::ffi::OsString;
use std::process::ExitCode;

use arguments::{Arguments, Command};
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use new_file::whole_or_nothing;
use output::{Failure, Outcome, Report};
use role::Role;

use crate::sequence::tell_of_waits;

/// Runs the program with its arguments, the program's name first.
pub fn run(arguments: &[OsString]) -> ExitCode {
    match role::of(arguments) {
        Role::MountHelper(rest) => helper::mount(&rest),
        Role::UmountHelper(rest) => helper::umount(&rest),
        Role::Command => match parse(arguments) {
            Ok((Arguments { command }, found)) => {
                tell_of_waits(|locked| {
                    let locked = history::shown(locked);
                    output::complain("kvfs", &format!("waiting for whoever has locked {locked}"));
                });
                let is_answered = answering::check(&command, &found);
                output::finish("kvfs", is_answered.and_then(|()| dispatch(command)))
            }
            Err(error) => output::usage(&error),
        },
    }
}

fn parse(arguments: &[OsString]) -> Result<(Arguments, ArgMatches), clap::Error> {
    let found = Arguments::command().try_get_matches_from(arguments)?;
    Ok((Arguments::from_arg_matches(&found)?, found))
}

fn dispatch(command: Command) -> Outcome {
    match command {
        Command::Demo => demo::run(),
        Command::Mount(arguments) => {
            let is_json = arguments.json;
            mount::run(&arguments.config()?.with_keys()?, is_json)
        }
        Command::Umount(arguments) => umount::run(&arguments),
        Command::Create(arguments) => create::run(&arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Map(arguments) => whole_or_nothing(|| map::run(&arguments)),
        Command::Log(arguments) => history::run(&arguments),
        Command::Explain(arguments) => explain::run(&arguments),
        Command::WhatIf(arguments) => what_if::run(&arguments),
        Command::Config(command) => config_command::run(&command),
        Command::Sync(arguments) => sync::run(&arguments),
        Command::Upgrade(arguments) => upgrade::run(&arguments),
        Command::Promote(arguments) => movement::promote(&arguments),
        Command::Evict(arguments) => movement::evict(&arguments),
        Command::Hint(arguments) => hint::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Diff(arguments) => diff::run(&arguments),
        Command::Match(arguments) => prefix::run(&arguments),
        Command::Block(arguments) => block::run(&arguments),
        Command::Import(arguments) => convert::import(&arguments),
        Command::Export(arguments) => whole_or_nothing(|| convert::export(&arguments)),
        Command::Slots(command) => slots::run(&command),
        Command::Seq(arguments) => whole_or_nothing(|| seq::run(&arguments)),
        Command::Model(command) => model::run(&command),
        Command::Quota(arguments) => quota::run(&arguments),
        Command::Gc(arguments) => gc::run(&arguments),
        Command::Remote(command) => remote::run(&command),
        Command::Scrub(arguments) => scrub::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Fsck(arguments) => fsck::run(&arguments),
        Command::Bench(arguments) => match bench::run(&arguments) {
            Ok(()) => Ok(Report::default()),
            Err(line) => Err(Failure::Failed(line)),
        },
        Command::Completions(arguments) => manual::completions(&arguments),
        Command::Man(arguments) => manual::write(&arguments),
        Command::Version => Ok(Report::text(format!("kvfs {}\n", env!("CARGO_PKG_VERSION")))),
        Command::Probe(arguments) => probe::answer(&arguments),
        Command::Sample(arguments) => top::answer(&arguments),
        Command::TakeOver(arguments) => take_over::run(&arguments),
    }
}
