//! `kvfs mount`: checks, becomes a daemon unless told to stay, serves.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use serde_json::json;

use super::browser::Browser;
use super::config::MountConfig;
use super::daemon::{self, Child, Reporter, Side};
use super::logging::Target;
use super::output::{EXIT_FAILED, EXIT_OK, Failure, Outcome, Report};
use super::probe::{ANSWER_DEADLINE, Answer, Question, ask, daemon as daemon_of};
use super::process::{KEEPER_NAME, parent};
use super::settings::Steerer;
use super::stop::StopSignals;
use super::unmount::{How, UnmountError, unmount};
use super::{limits, logging, metrics, preflight, service};
use crate::fs::takeover::{Handover, Launch};
use crate::fuse::{self, keeper};

/// Mounts as configured. What a daemon serves is told in JSON if that is wanted, and else not at all.
pub(crate) fn run(config: &MountConfig, is_json: bool) -> Outcome {
    let mut config = preflight::check(config)?;
    metrics::check(&config.options)?;
    let log_file = match &config.log_file {
        None if !config.foreground => {
            Some(logging::default_path(&config.options.store).map_err(Failure::Failed)?)
        }
        named => named.clone(),
    };
    equip(&mut config, log_file.clone());
    config.options.launch = Some(Arc::new(launch(&config)));
    match log_file {
        Some(path) if !config.foreground => start(&config, &path, is_json),
        log_file => stay(&config, log_file),
    }
}

fn equip(config: &mut MountConfig, log_file: Option<PathBuf>) {
    config.options.page = Some(Arc::new(Browser::default()));
    config.options.steering = Some(Arc::new(Steerer::new(config, log_file)));
}

/// How this program was called, for the one that goes on with the mount.
fn launch(config: &MountConfig) -> Launch {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let named = arguments.first().map(Path::new).filter(|name| name.components().count() > 1);
    // A name without a directory was found on the path.
    let program = named.and_then(|name| std::path::absolute(name).ok());
    let program = program.filter(|program| program.is_file());
    Launch {
        program: program.or_else(|| std::env::current_exe().ok()).unwrap_or_default(),
        arguments,
        directory: std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
        store: config.options.store.clone(),
        mountpoint: config.options.mountpoint.clone(),
        ..Launch::default()
    }
}

/// Goes on with a mount that another daemon has left in this process.
pub(crate) fn go_on(mut config: MountConfig, left: Handover) -> Result<(), Failure> {
    // Older kernels call a program that was given to them open by the number of the descriptor.
    let _ = nix::sys::prctl::set_name(c"kvfs");
    let log_file = match &config.log_file {
        None if !config.foreground => {
            Some(logging::default_path(&config.options.store).map_err(Failure::Failed)?)
        }
        named => named.clone(),
    };
    let target = match &log_file {
        // Standard error is it already.
        Some(path) if !config.foreground => Target::StandardIn(path.clone()),
        Some(path) => Target::file(path.clone()).map_err(Failure::Failed)?,
        None => Target::Standard,
    };
    logging::start(config.log_level.as_deref(), target, &config.options.store);
    equip(&mut config, log_file);
    let launch = Launch { settings: String::new(), ..left.launch.clone() };
    config.options.launch = Some(Arc::new(launch));
    let tell = tell_of_readiness(&config);
    let is_kept = left.is_kept();
    let ready = move || {
        if !is_kept {
            tell();
        }
    };
    serve(&config, Some(left), ready).map_err(|line| {
        log::error!("{line}");
        log::error!(
            "the mount ends here if it did not go on: what was open is lost, what was made durable is in the store; \
             mount it again"
        );
        Failure::Failed(line)
    })
}

fn stay(config: &MountConfig, log_file: Option<PathBuf>) -> Outcome {
    let target = log_file.map_or(Ok(Target::Standard), Target::file);
    let target = target.map_err(Failure::Failed)?;
    logging::start(config.log_level.as_deref(), target, &config.options.store);
    let config = match keep(config, || {}).map_err(Failure::Failed)? {
        Role::Serving(config) => config,
        Role::Kept(exit) => return Ok(Report { exit, ..Report::default() }),
    };
    let is_kept = config.options.keeper.is_some();
    let tell = tell_of_readiness(&config);
    // A manager hears only from the process that it knows.
    let ready = move || {
        if !is_kept {
            tell();
        }
    };
    serve(&config, None, ready).map_err(Failure::Failed)?;
    Ok(Report::default())
}

fn tell_of_readiness(config: &MountConfig) -> impl Fn() + Send + 'static {
    let status = format!("STATUS={} is ready", config.options.mountpoint.display());
    move || service::notify(&["READY=1", &status])
}

/// What this process is in a mount.
enum Role {
    /// It serves the mount, which may be kept by another one.
    Serving(Box<MountConfig>),
    /// It has kept a mount, which has ended; with what it exits.
    Kept(u8),
}

/// Splits off a keeper, if the mount is to have one, which calls `begun` first.
fn keep(config: &MountConfig, begun: impl FnOnce()) -> Result<Role, String> {
    let mut config = config.clone();
    if !config.keep_mounted {
        return Ok(Role::Serving(Box::new(config)));
    }
    // The next daemon gets its descriptors from this process.
    limits::raise(config.options.read_only)?;
    let split = keeper::split(&config.options.store, &config.options.mountpoint);
    match split.map_err(|error| format!("the keeper of the mount: {error}"))? {
        keeper::Side::Daemon(kept) => {
            config.options.keeper = Some(Arc::new(kept));
            Ok(Role::Serving(Box::new(config)))
        }
        keeper::Side::Keeper(keeping) => {
            begun();
            let _ = nix::sys::prctl::set_name(KEEPER_NAME);
            let exit = keeping.run(tell_of_readiness(&config), || {
                if logging::is_file() {
                    logging::reopen();
                }
            });
            Ok(Role::Kept(u8::try_from(exit).unwrap_or(EXIT_FAILED)))
        }
    }
}

fn start(config: &MountConfig, path: &Path, is_json: bool) -> Outcome {
    let log = logging::open(path).map_err(Failure::Failed)?;
    match daemon::split().map_err(|error| Failure::failed(format!("fork: {error}")))? {
        Side::Parent(child) => {
            let pid = confirm(child, config, path).map_err(Failure::Failed)?;
            let named = |path: &Path| path.display().to_string();
            let value = json!({
                "store": named(&config.options.store),
                "mountpoint": named(&config.options.mountpoint),
                "pid": pid,
                "log": named(path),
            });
            Ok(Report::answer(is_json, &value, String::new()))
        }
        Side::Daemon(reporter) => {
            let outcome = daemon::detach(log, &reporter);
            let outcome = outcome.map_err(|error| format!("daemon: {error}"));
            let exit = run_daemon(outcome, config, path, &reporter);
            // Not back into the caller's code, which may have more to say to the terminal.
            std::process::exit(i32::from(exit));
        }
    }
}

fn run_daemon(
    detached: Result<(), String>, config: &MountConfig, log_file: &Path, reporter: &Reporter,
) -> u8 {
    let target = Target::StandardIn(log_file.to_owned());
    logging::start(config.log_level.as_deref(), target, &config.options.store);
    let ready = {
        let reporter = reporter.clone();
        move || {
            if !reporter.ready() {
                log::warn!("whoever asked for this mount is gone");
                // The signal is held for the thread that unmounts.
                if let Err(error) = nix::sys::signal::kill(nix::unistd::getpid(), Signal::SIGTERM) {
                    log::error!("cannot stop: {error}");
                }
            }
        }
    };
    let config = match detached.and_then(|()| keep(config, || reporter.leave())) {
        Ok(Role::Serving(config)) => Ok(config),
        Ok(Role::Kept(exit)) => return exit,
        Err(line) => Err(line),
    };
    match config.and_then(|config| serve(&config, None, ready)) {
        Ok(()) => EXIT_OK,
        Err(line) => {
            log::error!("{line}");
            reporter.failed(&line);
            EXIT_FAILED
        }
    }
}

/// Serves until unmounted or stopped.
fn serve(
    config: &MountConfig, left: Option<Handover>, announce: impl FnOnce() + Send + 'static,
) -> Result<(), String> {
    let options = &config.options;
    match limits::raise(options.read_only) {
        // What was mounted before goes on.
        Err(line) if left.is_some() => log::warn!("{line}"),
        raised => raised?,
    }
    let started = || -> io::Result<_> {
        // One that goes on was ready before.
        let ready = Arc::new(AtomicBool::new(left.is_some()));
        let signals = StopSignals::hold()?;
        let is_kept = options.keeper.is_some() || left.as_ref().is_some_and(Handover::is_kept);
        let watch = signals.watch(options, ready.clone(), is_kept)?;
        Ok((ready, watch))
    };
    let (ready, watch) = started().map_err(|error| format!("signals: {error}"))?;
    log::info!(
        "kvfs {} (pid {}): {} {} at {}",
        env!("CARGO_PKG_VERSION"),
        std::process::id(),
        if left.is_some() { "going on with" } else { "mounting" },
        options.store.display(),
        options.mountpoint.display()
    );
    let mountpoint = options.mountpoint.clone();
    let ready = move || {
        ready.store(true, Ordering::Release);
        log::info!("{} is ready", mountpoint.display());
        announce();
    };
    let outcome = match left {
        Some(left) => fuse::go_on(options, left, ready),
        None => fuse::serve(options, ready),
    };
    watch.finish();
    match outcome {
        Ok(()) => {
            log::info!(
                "{} is unmounted, everything is durable on its disk",
                options.mountpoint.display()
            );
        }
        // Helpers that the kernel or fuser call add line feeds of their own.
        Err(error @ fuse::MountError::Mount(_)) => {
            return Err(error.to_string().trim_end().replace('\n', " "));
        }
        Err(error) => return Err(error.to_string().trim_end().to_owned()),
    }
    Ok(())
}

fn how_it_ended(status: nix::Result<WaitStatus>) -> String {
    match status {
        Ok(WaitStatus::Signaled(_, signal, _)) => format!("was killed by {signal}"),
        _ => "ended".to_owned(),
    }
}

/// Waits until the daemon says that it serves, and then asks the mount itself. The number of the daemon's process.
fn confirm(child: Child, config: &MountConfig, log: &Path) -> Result<i32, String> {
    let pid = child.pid;
    let see = format!("see {}", log.display());
    match child.wait_until_ready() {
        Ok(()) => {}
        Err(Some(line)) => return Err(line),
        Err(None) => {
            let ended = how_it_ended(waitpid(pid, None));
            return Err(format!("the daemon {ended} before the mount was ready: {see}"));
        }
    }
    let place = config.options.mountpoint.display();
    let answer = ask(&config.options.mountpoint, Question::Status, ANSWER_DEADLINE);
    match answer.map_err(|error| format!("{place} is mounted but cannot be asked: {error}"))? {
        Answer::Alive(status) => {
            let is_ours = |daemon: &i32| {
                *daemon == pid.as_raw()
                    || config.keep_mounted && parent(*daemon) == Some(pid.as_raw())
            };
            let daemon = daemon_of(&status).0.filter(is_ours);
            daemon.ok_or_else(|| format!("{place} is served by another daemon: {see}"))
        }
        Answer::Refused(error) => Err(format!("{place} is mounted but answers {error}: {see}")),
        Answer::Dead => {
            // Collected, so that its end is not mistaken for a running daemon.
            let ended = how_it_ended(waitpid(pid, Some(WaitPidFlag::WNOHANG)));
            // Nobody serves it: whoever mounts again would find it in the way.
            let left = match unmount(&config.options.mountpoint, How::Detach) {
                Ok(()) | Err(UnmountError::NotMounted) => "",
                Err(_) => ", and its mount is left",
            };
            Err(format!("the daemon {ended} right after mounting {place}{left}: {see}"))
        }
        Answer::Stuck => Err(format!(
            "{place} is mounted but does not answer within {} seconds: {see}, or unmount it with \
             kvfs umount --force {place}",
            ANSWER_DEADLINE.as_secs()
        )),
    }
}
