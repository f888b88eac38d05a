//! The protocols of mount(8) and umount(8) helpers.
//!
//! ```text
//! mount.kvfs STORE MOUNTPOINT [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]
//! umount.fuse.kvfs MOUNTPOINT [-flnrv] [-N NAMESPACE] [-t TYPE]
//! ```
//!
//! mount(8) passes a helper's exit code on, so the codes are those of mount(8), not ours.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::arguments::UmountArguments;
use super::config::{self, MountConfig, Named};
use super::output::{Failure, complain};
use super::{config_command, mount, options, preflight, settings, umount};

/// Incorrect invocation or permissions.
const EXIT_INVOCATION: u8 = 1;
/// Mount or umount failure.
const EXIT_MOUNT_FAILED: u8 = 32;

/// Runs as `mount.kvfs`, with the arguments after the program's name.
pub(crate) fn mount(arguments: &[OsString]) -> ExitCode {
    finish("mount.kvfs", parse(arguments, "mount").and_then(|call| mount_call(&call)))
}

/// Runs as `umount.fuse.kvfs`, with the arguments after the program's name.
pub(crate) fn umount(arguments: &[OsString]) -> ExitCode {
    finish("umount.kvfs", parse(arguments, "umount").and_then(|call| umount_call(&call)))
}

fn finish(program: &str, outcome: Result<(), Failure>) -> ExitCode {
    let Err(failure) = outcome else {
        return ExitCode::SUCCESS;
    };
    complain(program, failure.line());
    ExitCode::from(match failure {
        Failure::Usage(_) => EXIT_INVOCATION,
        Failure::Failed(_) => EXIT_MOUNT_FAILED,
    })
}

fn mount_call(call: &Call) -> Result<(), Failure> {
    let [store, mountpoint] = call.paths.as_slice() else {
        return Err(Failure::Usage("usage: mount.kvfs STORE MOUNTPOINT [-o OPTIONS]".to_owned()));
    };
    let dash_o = parse_options(call)?;
    if dash_o.is_remount {
        if let Some(unknown) = dash_o.unknown {
            return Err(Failure::Usage(settings::unknown(&unknown)));
        }
        return if call.has('f') {
            Ok(())
        } else {
            config_command::remount(mountpoint, &dash_o.layer)
        };
    }
    let config = resolve((store, mountpoint), dash_o)?.with_keys()?;
    if call.has('f') {
        return preflight::check_paths(&config).map(|_| ());
    }
    mount::run(&config, false).map(|_| ())
}

/// What follows `-o`.
fn parse_options(call: &Call) -> Result<options::Parsed, Failure> {
    let dash_o = options::parse(&call.options, options::Writer::MountProgram);
    let mut dash_o = dash_o.map_err(Failure::Usage)?;
    if call.has('s') {
        dash_o.unknown = None;
    }
    Ok(dash_o)
}

fn resolve(
    (store, mountpoint): (&Path, &Path), dash_o: options::Parsed,
) -> Result<MountConfig, Failure> {
    let named =
        Named { store: store.to_owned(), mountpoint: mountpoint.to_owned(), ..Named::default() };
    config::resolve(named, dash_o, &|name| std::env::var_os(name))
}

/// The mount that the arguments after the program's name make.
pub(crate) fn mount_config(arguments: &[OsString]) -> Result<MountConfig, Failure> {
    let call = parse(arguments, "mount")?;
    let [store, mountpoint] = call.paths.as_slice() else {
        return Err(Failure::Usage("a store and a mountpoint are missing".to_owned()));
    };
    let dash_o = parse_options(&call)?;
    resolve((store, mountpoint), dash_o)
}

fn umount_call(call: &Call) -> Result<(), Failure> {
    let [mountpoint] = call.paths.as_slice() else {
        return Err(Failure::Usage("usage: umount.fuse.kvfs MOUNTPOINT [-l] [-f]".to_owned()));
    };
    let arguments = UmountArguments {
        json: false,
        lazy: call.has('l'),
        force: call.has('f'),
        mountpoint: mountpoint.clone(),
    };
    umount::run(&arguments).map(|_| ())
}

/// A helper's arguments. `-n` (no mtab) and `-v` (verbose) change nothing here; `-r` asks for a
/// read-only remount if unmounting fails, which FUSE does not have: then it just fails.
#[derive(Debug, Default, PartialEq, Eq)]
struct Call {
    paths: Vec<PathBuf>,
    flags: Vec<char>,
    options: Vec<String>,
}

impl Call {
    fn has(&self, flag: char) -> bool {
        self.flags.contains(&flag)
    }
}

fn parse(arguments: &[OsString], role: &str) -> Result<Call, Failure> {
    let (flags, values) = if role == "mount" { ("sfnv", "otN") } else { ("flnrv", "tN") };
    let mut call = Call::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let bytes = argument.as_bytes();
        if bytes.len() < 2 || bytes[0] != b'-' {
            call.paths.push(PathBuf::from(argument));
            continue;
        }
        let text = utf8(argument)?;
        for (at, letter) in text.char_indices().skip(1) {
            if flags.contains(letter) {
                call.flags.push(letter);
            } else if values.contains(letter) {
                let joined = &text[at + letter.len_utf8()..];
                let value = match rest.as_slice().first() {
                    _ if !joined.is_empty() => joined,
                    Some(next) => {
                        rest.next();
                        utf8(next)?
                    }
                    None => return Err(Failure::Usage(format!("-{letter} needs a value"))),
                };
                take_value(&mut call, letter, value)?;
                break;
            } else {
                return Err(Failure::Usage(format!("unknown option -{letter}")));
            }
        }
    }
    Ok(call)
}

fn take_value(call: &mut Call, letter: char, value: &str) -> Result<(), Failure> {
    match letter {
        'o' => call.options.push(value.to_owned()),
        // The type is the one by which this program was found.
        't' => {}
        _ => {
            return Err(Failure::Usage(format!("-{letter} {value} is not supported")));
        }
    }
    Ok(())
}

fn utf8(argument: &OsStr) -> Result<&str, Failure> {
    argument.to_str().ok_or_else(|| {
        Failure::Usage(format!("argument {} is not UTF-8", argument.to_string_lossy()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls() {
        fn check(role: &str, line: &str, expected: Result<(&str, &str, &str), &str>) {
            let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let found = parse(&arguments, role).map(|call| {
                let paths = call.paths.iter().map(|path| path.display().to_string());
                let paths = paths.collect::<Vec<_>>().join(" ");
                (paths, call.flags.into_iter().collect::<String>(), call.options.join(" "))
            });
            let found = found.as_ref().map(|(p, f, o)| (p.as_str(), f.as_str(), o.as_str()));
            assert_eq!(found.map_err(Failure::line), expected, "{line}");
        }
        check("mount", "/s /m -o rw,dev,suid", Ok(("/s /m", "", "rw,dev,suid")));
        check("mount", "/s /m -f -n -v -o rw", Ok(("/s /m", "fnv", "rw")));
        check("mount", "/s /m -sfv -orw -o ro", Ok(("/s /m", "sfv", "rw ro")));
        check("mount", "-t fuse.kvfs /s /m", Ok(("/s /m", "", "")));
        check("mount", "/s - -o rw", Ok(("/s -", "", "rw")));
        check("mount", "/s /m -o", Err("-o needs a value"));
        check("mount", "/s /m -x", Err("unknown option -x"));
        check("mount", "/s /m -l", Err("unknown option -l"));
        check("mount", "/s /m -N 7", Err("-N 7 is not supported"));
        check("umount", "/m", Ok(("/m", "", "")));
        check("umount", "/m -l -f -n -r -v -t fuse.kvfs", Ok(("/m", "lfnrv", "")));
        check("umount", "/m -o rw", Err("unknown option -o"));
    }
}
