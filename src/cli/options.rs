//! `-o key=value,...`, as mount(8) and fstab(5) write it.
//!
//! Every option is honoured, known to be somebody else's, or an error: a mistyped option that
//! was ignored would surface only when it is needed.

use std::path::PathBuf;

use super::config::Layer;
use super::size::Size;

/// Flags that the kernel knows and their opposites; of a pair the last one counts.
const KERNEL_FLAGS: [(&str, &str); 3] = [("noexec", "exec"), ("noatime", "atime"), ("", "async")];

/// Flags that promise what a mount does not keep: changes are committed together.
const SYNCHRONOUS: [&str; 2] = ["sync", "dirsync"];

/// Options for mount(8), systemd or the boot scripts, or that say what is the case anyway: a
/// cache holds neither devices nor programs (but `mount.fuse3` always passes `dev,suid`), FUSE
/// updates access times as `relatime`, and the kernel always checks permissions.
const IGNORED: [&str; 25] = [
    "defaults",
    "_netdev",
    "nofail",
    "auto",
    "noauto",
    "user",
    "users",
    "nouser",
    "owner",
    "group",
    "nosuid",
    "suid",
    "nodev",
    "dev",
    "relatime",
    "norelatime",
    "diratime",
    "nodiratime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "silent",
    "loud",
    "default_permissions",
];

/// The same with a value.
const IGNORED_PREFIXES: [&str; 3] = ["x-", "X-", "comment="];

/// What the options say.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Parsed {
    /// Settings.
    pub layer: Layer,
    /// `config=FILE`.
    pub config: Option<PathBuf>,
    /// The first option that nobody knows.
    pub unknown: Option<String>,
}

/// Reads options, each element a comma-separated list.
pub(crate) fn parse<S: AsRef<str>>(lists: &[S]) -> Result<Parsed, String> {
    let mut parsed = Parsed::default();
    let options = lists.iter().flat_map(|list| list.as_ref().split(','));
    for option in options.filter(|option| !option.is_empty()) {
        if !apply(&mut parsed, option)? {
            parsed.unknown.get_or_insert_with(|| option.to_owned());
        }
    }
    Ok(parsed)
}

/// Applies one option; false if nobody knows it.
fn apply(parsed: &mut Parsed, option: &str) -> Result<bool, String> {
    if let Some(why) = refusal(option) {
        return Err(why);
    }
    let ignored = IGNORED.contains(&option)
        || IGNORED_PREFIXES.iter().any(|prefix| option.starts_with(prefix));
    if ignored {
        return Ok(true);
    }
    if let Some(flag) = kernel_flag(option) {
        push_kernel_flag(parsed.layer.options.get_or_insert_default(), flag);
        return Ok(true);
    }
    let layer = &mut parsed.layer;
    let (key, value) = match option.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (option, None),
    };
    match (key, value) {
        ("ro", None) => layer.read_only = Some(true),
        ("rw", None) => layer.read_only = Some(false),
        ("allow_other", value) => layer.allow_other = Some(yes_or_no(key, value)?),
        ("read_only", value) => layer.read_only = Some(yes_or_no(key, value)?),
        ("passthrough", value) => layer.passthrough = Some(yes_or_no(key, value)?),
        ("io_uring", value) => layer.io_uring = Some(yes_or_no(key, value)?),
        ("offline", value) => layer.offline = Some(yes_or_no(key, value)?),
        ("nonempty", value) => layer.nonempty = Some(yes_or_no(key, value)?),
        ("commit_interval", Some(value)) => layer.commit_interval = Some(number(key, value)?),
        ("ram", Some(value)) => layer.ram = Some(size(key, value)?),
        ("ssd", Some(value)) => layer.ssd = Some(size(key, value)?),
        ("remote", Some(value)) => layer.remote = Some(value.to_owned()),
        ("remote_key", Some(value)) => layer.remote_key = Some(PathBuf::from(value)),
        ("remote_key_command", Some(value)) => {
            layer.remote_key_command = Some(value.to_owned());
        }
        ("remote_bandwidth", Some(value)) => layer.remote_bandwidth = Some(size(key, value)?),
        ("remote_index", Some(value)) => layer.remote_index = Some(number(key, value)?),
        ("cold", Some(value)) => layer.cold = Some(value.to_owned()),
        ("on_corrupt", Some(value)) => layer.on_corrupt = Some(value.to_owned()),
        ("verify", Some(value)) => layer.verify = Some(value.to_owned()),
        ("rebuild_from", Some(value)) => layer.rebuild_from = Some(value.to_owned()),
        ("threads", Some(value)) => layer.threads = Some(number(key, value)?),
        ("metrics_addr", Some(value)) => layer.metrics_addr = Some(value.to_owned()),
        ("log_file", Some(value)) => layer.log_file = Some(PathBuf::from(value)),
        ("log_level", Some(value)) => layer.log_level = Some(value.to_owned()),
        ("config", Some(value)) => parsed.config = Some(PathBuf::from(value)),
        (
            "commit_interval" | "ram" | "ssd" | "remote" | "remote_key" | "remote_key_command"
            | "remote_bandwidth" | "remote_index" | "cold" | "on_corrupt" | "verify"
            | "rebuild_from" | "threads" | "metrics_addr" | "log_file" | "log_level" | "config",
            None,
        ) => {
            return Err(format!("option {key} needs a value: {key}=..."));
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Why a flag that the kernel knows is refused.
pub(crate) fn refusal(flag: &str) -> Option<String> {
    SYNCHRONOUS.contains(&flag).then(|| {
        format!(
            "option {flag} is not offered: use fsync, O_SYNC or kvfs sync, or a shorter commit_interval"
        )
    })
}

/// Whether a flag asks for something that is not the default.
pub(crate) fn is_effective(flag: &str) -> bool {
    KERNEL_FLAGS.iter().any(|(on, _)| *on == flag)
}

/// The flag with a static lifetime, if the kernel knows it.
pub(crate) fn kernel_flag(option: &str) -> Option<&'static str> {
    let flags = KERNEL_FLAGS.iter().flat_map(|(on, off)| [*on, *off]);
    flags.filter(|flag| !flag.is_empty()).find(|flag| *flag == option)
}

/// Adds a flag, replacing its opposite or itself.
pub(crate) fn push_kernel_flag(flags: &mut Vec<String>, flag: &str) {
    let pair = KERNEL_FLAGS.iter().find(|(on, off)| *on == flag || *off == flag);
    if let Some((on, off)) = pair {
        flags.retain(|known| known != on && known != off);
    }
    flags.push(flag.to_owned());
}

/// The value of a switch; a bare option switches on.
pub(crate) fn yes_or_no(key: &str, value: Option<&str>) -> Result<bool, String> {
    match value {
        None | Some("yes" | "true" | "1") => Ok(true),
        Some("no" | "false" | "0") => Ok(false),
        Some(value) => Err(format!("{key} is {value:?}: must be yes or no")),
    }
}

/// A value that is a number.
pub(crate) fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{key} is {value:?}: must be a number"))
}

/// A value that is a number of bytes.
pub(crate) fn size(key: &str, value: &str) -> Result<Size, String> {
    value.parse().map_err(|error| format!("{key}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepted() {
        fn check(list: &str, expected: Layer) {
            let parsed = parse(&[list]).unwrap();
            assert_eq!(parsed, Parsed { layer: expected, ..Parsed::default() }, "{list}");
        }
        let flags = |flags: &[&str]| Layer {
            options: Some(flags.iter().map(|flag| (*flag).to_owned()).collect()),
            ..Layer::default()
        };
        let read_only = |on| Layer { read_only: Some(on), ..Layer::default() };
        let allow_other = |on| Layer { allow_other: Some(on), ..Layer::default() };
        check("", Layer::default());
        check(",,defaults,_netdev,nofail,noauto,user", Layer::default());
        check("x-systemd.automount,X-mount.mkdir,comment=cache", Layer::default());
        check("relatime,default_permissions", Layer::default());
        check("ro", read_only(true));
        check("ro,rw", read_only(false));
        check("read_only=no", read_only(false));
        check("allow_other", allow_other(true));
        check("allow_other,allow_other=no", allow_other(false));
        check("nosuid,nodev,suid,dev", Layer::default());
        check("noexec,noatime", flags(&["noexec", "noatime"]));
        check("noexec,noatime,exec", flags(&["noatime", "exec"]));
        check("noexec,noexec,async", flags(&["noexec", "async"]));
        check(
            "threads=8,commit_interval=0.5,ram=2G,passthrough=no,io_uring=no,nonempty",
            Layer {
                ram: Some(Size(2 << 30)),
                threads: Some(8),
                commit_interval: Some(0.5),
                passthrough: Some(false),
                io_uring: Some(false),
                nonempty: Some(true),
                ..Layer::default()
            },
        );
        check(
            "ssd=1T,remote=s3://bucket/a,remote_bandwidth=100M,cold=zstd:5",
            Layer {
                ssd: Some(Size(1 << 40)),
                remote: Some("s3://bucket/a".to_owned()),
                remote_bandwidth: Some(Size(100 << 20)),
                cold: Some("zstd:5".to_owned()),
                ..Layer::default()
            },
        );
        check(
            "log_file=/var/log/a=b.log,log_level=debug",
            Layer {
                log_file: Some(PathBuf::from("/var/log/a=b.log")),
                log_level: Some("debug".to_owned()),
                ..Layer::default()
            },
        );
    }

    #[test]
    fn refused() {
        fn check(list: &str, expected: &str) {
            assert_eq!(parse(&[list]), Err(expected.to_owned()), "{list}");
        }
        check("allow_other=maybe", "allow_other is \"maybe\": must be yes or no");
        check("threads=many", "threads is \"many\": must be a number");
        check("ram=lots", "ram: \"lots\" is no size: write bytes or a number with K, M, G or T");
        check("threads=-1", "threads is \"-1\": must be a number");
        let offered =
            "is not offered: use fsync, O_SYNC or kvfs sync, or a shorter commit_interval";
        check("noatime,sync", &format!("option sync {offered}"));
        check("dirsync", &format!("option dirsync {offered}"));
        check("config", "option config needs a value: config=...");
    }

    #[test]
    fn unknown_and_config() {
        fn check(list: &str, unknown: Option<&str>) {
            assert_eq!(parse(&[list]).unwrap().unknown.as_deref(), unknown, "{list}");
        }
        check("rw,alow_other,foo", Some("alow_other"));
        check("nvme=4G", Some("nvme=4G"));
        check("ro=yes", Some("ro=yes"));
        check("uid=1000", Some("uid=1000"));
        check("x-anything=at,all", Some("all"));
        let parsed = parse(&["ro", "config=/etc/kvfs.toml"]).unwrap();
        assert_eq!(parsed.config, Some(PathBuf::from("/etc/kvfs.toml")));
    }
}
