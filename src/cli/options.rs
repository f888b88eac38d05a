//! `-o key=value,...`, as mount(8) and fstab(5) write it.
//!
//! Every option is honoured, known to be somebody else's, or an error: a mistyped option that
//! was ignored would surface only when it is needed.

use super::settings::{Kind, Layer, Value, find};

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

/// What the kernel tells of a mount, which mount(8) gives to a remount.
const TOLD_PREFIXES: [&str; 5] = ["user_id=", "group_id=", "rootmode=", "max_read=", "blksize="];

/// What the options say.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Parsed {
    /// Settings.
    pub layer: Layer,
    /// `remount`: the mount is there, and changes.
    pub is_remount: bool,
    /// The first option that nobody knows.
    pub unknown: Option<String>,
}

/// Who wrote the options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// Whoever calls `kvfs mount`.
    Caller,
    /// mount(8), which says `rw` of every mount of which nobody says `ro`.
    MountProgram,
}

/// Reads options, each element a comma-separated list.
pub(crate) fn parse<S: AsRef<str>>(lists: &[S], writer: Writer) -> Result<Parsed, String> {
    let lists: Vec<Vec<String>> =
        lists.iter().map(|list| split(list.as_ref())).collect::<Result<_, _>>()?;
    let options = || lists.iter().flatten().filter(|option| !option.is_empty());
    let is_remount = options().any(|option| option == "remount");
    let mut parsed = Parsed { is_remount, ..Parsed::default() };
    for option in options() {
        if !apply(&mut parsed, option, writer)? {
            parsed.unknown.get_or_insert_with(|| option.to_owned());
        }
    }
    Ok(parsed)
}

/// The options of a list. Inside of double quotes, as mount(8) has them, and after a backslash a comma is a letter
/// like others; three octal digits after a backslash are one, as in fstab(5).
fn split(list: &str) -> Result<Vec<String>, String> {
    let (mut options, mut option) = (Vec::new(), String::new());
    let mut is_quoted = false;
    let mut rest = list;
    while let Some(letter) = rest.chars().next() {
        rest = &rest[letter.len_utf8()..];
        match letter {
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => options.push(std::mem::take(&mut option)),
            '\\' => {
                let (escaped, after) = unescape(rest);
                option.push(escaped);
                rest = after;
            }
            letter => option.push(letter),
        }
    }
    if is_quoted {
        return Err(format!("options {list}: a quotation mark has no other"));
    }
    options.push(option);
    Ok(options)
}

/// The letter that a backslash before `rest` stands for, and what follows.
fn unescape(rest: &str) -> (char, &str) {
    let digits = rest.get(..3).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let octal = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
    match (octal.filter(u8::is_ascii), rest.chars().next()) {
        (Some(byte), _) => (char::from(byte), &rest[3..]),
        (None, Some(letter @ (',' | '\\' | '"'))) => (letter, &rest[1..]),
        // Of other backslashes nothing is meant.
        (None, _) => ('\\', rest),
    }
}

/// Applies one option; false if nobody knows it.
fn apply(parsed: &mut Parsed, option: &str, writer: Writer) -> Result<bool, String> {
    if let Some(why) = refusal(option) {
        return Err(why);
    }
    let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| option.starts_with(prefix));
    let is_told = parsed.is_remount && (option == "remount" || begins(&TOLD_PREFIXES));
    if is_told || IGNORED.contains(&option) || begins(&IGNORED_PREFIXES) {
        return Ok(true);
    }
    if let Some(flag) = kernel_flag(option) {
        parsed.layer.add_flag(flag);
        return Ok(true);
    }
    let (key, value) = match option.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (option, None),
    };
    if option == "rw" && writer == Writer::MountProgram {
        // It takes an `ro` before it back; what other sources say of `read_only` counts.
        parsed.layer.remove("read_only");
        return Ok(true);
    }
    let switched = match (key, value) {
        ("ro", None) => Some(("read_only", true)),
        ("rw", None) => Some(("read_only", false)),
        _ => None,
    };
    if let Some((name, is_on)) = switched {
        parsed.layer = std::mem::take(&mut parsed.layer).with(name, Some(Value::Switch(is_on)));
        return Ok(true);
    }
    // Flags stand by themselves here.
    let Some(setting) = find(key).filter(|setting| setting.kind != Kind::Flags) else {
        return Ok(false);
    };
    let value = match value {
        Some(value) => Value::parse(setting.kind, key, value)?,
        None if setting.kind == Kind::Switch => Value::Switch(true),
        None => return Err(format!("option {key} needs a value: {key}=...")),
    };
    parsed.layer.set(setting, value);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(settings: &[(&str, &str)]) -> Layer {
        let mut layer = Layer::default();
        for (name, text) in settings {
            let setting = find(name).unwrap();
            layer.set(setting, Value::parse(setting.kind, name, text).unwrap());
        }
        layer
    }

    #[test]
    fn accepted() {
        fn check(list: &str, expected: &[(&str, &str)]) {
            let parsed = parse(&[list], Writer::Caller).unwrap();
            let expected = Parsed { layer: layer(expected), ..Parsed::default() };
            assert_eq!(parsed, expected, "{list}");
        }
        check("", &[]);
        check(",,defaults,_netdev,nofail,noauto,user", &[]);
        check("x-systemd.automount,X-mount.mkdir,comment=cache", &[]);
        check("relatime,default_permissions", &[]);
        check("ro", &[("read_only", "yes")]);
        check("ro,rw", &[("read_only", "no")]);
        check("read_only=no", &[("read_only", "no")]);
        check("allow_other", &[("allow_other", "yes")]);
        check("allow_other,allow_other=no", &[("allow_other", "no")]);
        check("nosuid,nodev,suid,dev", &[]);
        check("noexec,noatime", &[("options", "noexec,noatime")]);
        check("noexec,noatime,exec", &[("options", "noatime,exec")]);
        check("noexec,noexec,async", &[("options", "noexec,async")]);
        let all = [
            ("threads", "8"),
            ("commit_interval", "500ms"),
            ("ram", "2G"),
            ("passthrough", "no"),
            ("io_uring", "no"),
            ("nonempty", "yes"),
        ];
        check("threads=8,commit_interval=0.5,ram=2G,passthrough=no,io_uring=no,nonempty", &all);
        let tiers = [
            ("ssd", "1T"),
            ("remote", "s3://bucket/a"),
            ("remote_bandwidth", "100M"),
            ("cold", "zstd:5"),
        ];
        check("ssd=1T,remote=s3://bucket/a,remote_bandwidth=100M,cold=zstd:5", &tiers);
        let log = [("log_file", "/var/log/a=b.log"), ("log_level", "debug")];
        check("log_file=/var/log/a=b.log,log_level=debug", &log);
    }

    #[test]
    fn commas_in_values() {
        fn check(list: &str, log_level: &str) {
            let expected = layer(&[("ram", "1G"), ("log_level", log_level)]);
            assert_eq!(parse(&[list], Writer::Caller).unwrap().layer, expected, "{list}");
        }
        check(r"log_level=info\,kvfs=debug,ram=1G", "info,kvfs=debug");
        check(r"log_level=info\054kvfs=debug,ram=1G", "info,kvfs=debug");
        check(r#"log_level="info,kvfs=debug",ram=1G"#, "info,kvfs=debug");
        check(r#""log_level=info,kvfs=debug",ram=1G"#, "info,kvfs=debug");
        check(r"ram=1G,log_level=a\\,log_level=b\040\x\9\", "b \\x\\9\\");
        check(r"ram=1G,log_level=a\+40\-40", r"a\+40\-40");
        assert!(parse(&["remote=\"/r"], Writer::Caller).unwrap_err().contains("quotation mark"));
    }

    #[test]
    fn refused() {
        fn check(list: &str, expected: &str) {
            assert_eq!(parse(&[list], Writer::Caller), Err(expected.to_owned()), "{list}");
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
    fn what_mount_says_of_every_mount_says_nothing() {
        fn check(list: &str, expected: &[(&str, &str)]) {
            let parsed = parse(&[list], Writer::MountProgram).unwrap();
            assert_eq!(parsed.layer, layer(expected), "{list}");
        }
        check("rw", &[]);
        check("rw,remount", &[]);
        check("rw,ro", &[("read_only", "yes")]);
        check("ro,rw", &[]);
        check("rw,read_only=no", &[("read_only", "no")]);
    }

    #[test]
    fn unknown_and_config() {
        fn check(list: &str, unknown: Option<&str>) {
            assert_eq!(
                parse(&[list], Writer::Caller).unwrap().unknown.as_deref(),
                unknown,
                "{list}"
            );
        }
        check("rw,alow_other,foo", Some("alow_other"));
        check("nvme=4G", Some("nvme=4G"));
        check("ro=yes", Some("ro=yes"));
        check("uid=1000", Some("uid=1000"));
        check("user_id=0", Some("user_id=0"));
        check("user_id=0,group_id=0,remount", None);
        check("x-anything=at,all", Some("all"));
        let parsed = parse(&["remount,ro", "config=/etc/kvfs.toml"], Writer::Caller).unwrap();
        assert!(parsed.is_remount);
        assert_eq!(parsed.layer, layer(&[("read_only", "yes"), ("config", "/etc/kvfs.toml")]));
    }
}
