//! Whether the kernel may be asked for rings: a parameter of its module fuse, off when the machine starts.
//!
//! On, it changes nothing for servers that do not ask for rings, so a mount that may turn it on does, and
//! leaves it on: whoever turned it off again would take it from a mount that is made at the same time.

use std::io;
use std::path::Path;

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether it is on.
pub fn is_enabled() -> bool {
    is_on(Path::new(PARAMETER)).unwrap_or(false)
}

/// Turns it on where it is off; else the reason why there are no rings, with what mends it.
pub(crate) fn enable() -> Result<(), String> {
    enable_at(Path::new(PARAMETER))
}

fn enable_at(parameter: &Path) -> Result<(), String> {
    match is_on(parameter) {
        Ok(true) => Ok(()),
        Ok(false) => match std::fs::write(parameter, "Y") {
            Ok(()) => {
                log::info!(
                    "turned {} on for all mounts that ask for rings (--no-io-uring leaves it alone)",
                    parameter.display()
                );
                Ok(())
            }
            Err(error) => Err(format!(
                "off, and to turn on by root alone ({error}): echo Y | sudo tee {}",
                parameter.display()
            )),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err("the kernel cannot (Linux 6.14 can)".to_owned())
        }
        Err(error) => Err(format!("{}: {error}", parameter.display())),
    }
}

fn is_on(parameter: &Path) -> io::Result<bool> {
    Ok(std::fs::read_to_string(parameter)?.trim() == "Y")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_that_is_off_is_turned_on_where_that_is_allowed() {
        let directory = tempfile::tempdir().unwrap();
        let parameter = directory.path().join("enable_uring");
        let missing = enable_at(&parameter).unwrap_err();
        assert_eq!(missing, "the kernel cannot (Linux 6.14 can)");
        std::fs::write(&parameter, "N\n").unwrap();
        assert_eq!(enable_at(&parameter), Ok(()));
        assert!(is_on(&parameter).unwrap());
        assert_eq!(enable_at(&parameter), Ok(()));
    }

    #[test]
    fn who_may_not_turn_it_on_hears_the_command() {
        // Nobody can write it, root neither, and it says neither Y nor N.
        let parameter = Path::new("/sys/kernel/fscaps");
        if !parameter.exists() {
            eprintln!("skipped: no /sys/kernel/fscaps");
            return;
        }
        let reason = enable_at(parameter).unwrap_err();
        assert!(reason.contains("echo Y | sudo tee /sys"), "{reason}");
    }
}
