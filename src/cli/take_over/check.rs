//! Whether this program would make the mount that another daemon has: asked while that one serves, for afterwards it is too
//! late to refuse.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use kvfs_os::mountinfo;

use crate::cli::config::MountConfig;
use crate::cli::output::Failure;
use crate::cli::settings::{Origin, Steerer};
use crate::fs::Steering;
use crate::fs::takeover::Launch;

/// Refuses a mount that would be another one, or that could not be served.
pub(super) fn check(config: &MountConfig, launch: &Launch) -> Result<(), Failure> {
    check_capabilities(launch)?;
    check_settings(launch, &Steerer::new(config, None).configuration()).map_err(Failure::Failed)?;
    check_places(config, launch)
}

/// Backing files that the kernel has can only be used by who may register some.
fn check_capabilities(launch: &Launch) -> Result<(), Failure> {
    let own = kvfs_os::own_capabilities();
    let own = own.map_err(|error| Failure::failed(format!("/proc/self/status: {error}")))?;
    if launch.capabilities & !own == 0 {
        return Ok(());
    }
    Err(Failure::Failed(
        "it would have fewer capabilities than the daemon has: see getcap(8) of both programs"
            .to_owned(),
    ))
}

/// Compares the settings of two mounts. Those that only the new program knows are none of the old mount.
fn check_settings(launch: &Launch, own: &str) -> Result<(), String> {
    let own: BTreeMap<&str, &str> = lines(own).collect();
    for (name, value) in lines(&launch.configuration) {
        let now = own.get(name).copied().unwrap_or("nothing");
        if now != value {
            return Err(format!(
                "{name} would be {now}, the mount has {value}: a mount keeps its settings; change what can change with \
                 kvfs config set, anything else by mounting anew"
            ));
        }
    }
    Ok(())
}

fn lines(configuration: &str) -> impl Iterator<Item = (&str, &str)> {
    let settings = configuration.lines().filter(|line| !line.starts_with('#'));
    settings.filter_map(|line| line.split_once(" = "))
}

/// What is looked up before the mount is served may not lie in it.
fn check_places(config: &MountConfig, launch: &Launch) -> Result<(), Failure> {
    let files = config.sources.0.iter().filter_map(|(origin, _)| match origin {
        Origin::File(path) => Some(path),
        _ => None,
    });
    let places: Vec<&PathBuf> =
        files.chain([&launch.directory]).chain(config.log_file.as_ref()).collect();
    let mounts = mountinfo::read().unwrap_or_default();
    for place in places {
        let is_inside = std::fs::metadata(place)
            .is_ok_and(|found| mountinfo::is_mount_of(&mounts, found.dev(), &launch.store));
        if is_inside {
            return Err(Failure::Failed(format!(
                "{} lies in the mount itself, which could not be read meanwhile",
                place.display()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_value_is_refused_and_a_new_setting_is_not() {
        let configuration = "# store = \"/a\"\nssd = \"1G\"\nverify = \"always\"\n".to_owned();
        let launch = Launch { configuration, ..Launch::default() };
        let check = |own: &str| check_settings(&launch, own);
        assert_eq!(check("# store = \"/b\"\nnew = 1\nverify = \"always\"\nssd = \"1G\"\n"), Ok(()));
        let refused = check("ssd = \"2G\"\nverify = \"always\"\n").unwrap_err();
        assert!(refused.starts_with("ssd would be \"2G\", the mount has \"1G\""), "{refused}");
        let refused = check("ssd = \"1G\"\n").unwrap_err();
        assert!(refused.starts_with("verify would be nothing"), "{refused}");
    }
}
