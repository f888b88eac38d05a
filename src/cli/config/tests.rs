//! Which source of a setting counts, and which settings are refused.

use super::*;

/// What a mount says of itself in `.kvfs/config`.
fn to_toml(config: &MountConfig) -> String {
    use crate::fs::Steering as _;
    settings::Steerer::new(config, None).configuration()
}

fn layer(settings: &[(&str, &str)]) -> Layer {
    let mut layer = Layer::default();
    for (name, text) in settings {
        let setting = settings::find(name).unwrap();
        layer.set(setting, Value::parse(setting.kind, name, text).unwrap());
    }
    layer
}

/// Resolves with an environment given as a table.
fn resolved(
    layer: Layer, dash_o: &str, environment: &[(&str, &str)], file: &str,
) -> Result<MountConfig, Failure> {
    let dash_o = options::parse(&[dash_o], options::Writer::Caller).map_err(Failure::Usage)?;
    resolved_with(layer, dash_o, environment, file)
}

/// The same with options that are read already.
fn resolved_with(
    layer: Layer, dash_o: options::Parsed, environment: &[(&str, &str)], file: &str,
) -> Result<MountConfig, Failure> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kvfs.toml");
    std::fs::write(&path, file).unwrap();
    let named = Named {
        store: PathBuf::from("/store"),
        mountpoint: PathBuf::from("/mnt"),
        config: Some(path),
        layer,
        ..Named::default()
    };
    resolve(named, dash_o, &|name| {
        let found = environment.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| OsString::from(value))
    })
}

#[test]
fn defaults() {
    let config = resolved(Layer::default(), "", &[], "").unwrap();
    let threads = crate::fuse::default_threads(crate::fuse::Passthrough::Auto);
    let expected = format!(
        "# store = \"/store\"\n# mountpoint = \"/mnt\"\nram = 0\npack = 65536\nssd = \"none\"\nssd_writes = \"none\"\ncold = \"none\"\n\
         offline = false\nverify = \"first\"\n\
         on_corrupt = \"eio\"\ncommit_interval = 1.0\nread_only = false\nallow_other = false\n\
         nonempty = false\npassthrough = true\nio_uring = true\nkeep_mounted = false\nthreads = {threads}\noptions = []\n\
         log_level = \"{}\"\n",
        crate::cli::logging::DEFAULT_FILTER
    );
    assert_eq!(to_toml(&config), expected);
    assert!(!config.foreground && !config.nonempty);
}

#[test]
fn the_earlier_source_counts() {
    fn check(line: Option<usize>, dash_o: &str, variable: &str, file: &str, expected: usize) {
        let layer = Layer::default().with("threads", line.map(Value::Count));
        let config = resolved(layer, dash_o, &[("KVFS_THREADS", variable)], file).unwrap();
        assert_eq!(config.options.threads, expected);
    }
    check(None, "", "", "", crate::fuse::default_threads(crate::fuse::Passthrough::Auto));
    check(None, "", "", "threads = 5", 5);
    check(None, "", "6", "threads = 5", 6);
    check(None, "threads=7", "6", "threads = 5", 7);
    check(Some(8), "threads=7", "6", "threads = 5", 8);
}

#[test]
fn every_setting_from_every_source() {
    let file = "allow_other = true\nread_only = true\npassthrough = false\nio_uring = false\n\
        nonempty = true\noffline = true\ncommit_interval = 2\nthreads = 3\nlog_file = \"/l\"\nlog_level = \"debug\"\n\
        metrics_addr = \"unix:/m\"\noptions = [\"noatime\", \"noexec\"]";
    let variables = [
        ("KVFS_ALLOW_OTHER", "yes"),
        ("KVFS_READ_ONLY", "1"),
        ("KVFS_PASSTHROUGH", "no"),
        ("KVFS_IO_URING", "no"),
        ("KVFS_NONEMPTY", "true"),
        ("KVFS_OFFLINE", "yes"),
        ("KVFS_COMMIT_INTERVAL", "2"),
        ("KVFS_THREADS", "3"),
        ("KVFS_LOG_FILE", "/l"),
        ("KVFS_LOG", "debug"),
        ("KVFS_METRICS_ADDR", "unix:/m"),
        ("KVFS_OPTIONS", "noatime,noexec"),
    ];
    let dash_o = "allow_other,ro,passthrough=no,io_uring=no,nonempty,offline,commit_interval=2,threads=3,\
        log_file=/l,log_level=debug,metrics_addr=unix:/m,noatime,noexec";
    let from_file = resolved(Layer::default(), "", &[], file).unwrap();
    let from_environment = resolved(Layer::default(), "", &variables, "").unwrap();
    let from_dash_o = resolved(Layer::default(), dash_o, &[], "").unwrap();
    let text = to_toml(&from_file);
    assert_eq!(text, to_toml(&from_environment));
    assert_eq!(text, to_toml(&from_dash_o));
    assert_eq!(text, to_toml(&resolved(Layer::default(), "", &[], &text).unwrap()));
    assert!(from_file.options.allow_other && from_file.options.read_only && from_file.nonempty);
    assert_eq!(from_file.options.passthrough, Passthrough::Off);
    assert!(!from_file.options.io_uring && from_file.options.offline);
    assert_eq!(from_file.options.kernel_options, ["noatime", "noexec"]);
}

#[test]
fn the_mount_program_makes_nothing_writable_by_itself() {
    fn check(writer: options::Writer, dash_o: &str, variable: &str, file: &str, expected: bool) {
        let options = options::parse(&[dash_o], writer).unwrap();
        let environment = [("KVFS_READ_ONLY", variable)];
        let config = resolved_with(Layer::default(), options, &environment, file).unwrap();
        assert_eq!(config.options.read_only, expected, "{dash_o} {variable} {file}");
    }
    let file = "read_only = true";
    check(options::Writer::MountProgram, "rw", "", file, true);
    check(options::Writer::MountProgram, "rw,nosuid,ram=1G", "yes", "", true);
    check(options::Writer::MountProgram, "rw,read_only=no", "yes", file, false);
    check(options::Writer::MountProgram, "rw", "", "", false);
    check(options::Writer::MountProgram, "ro", "no", "", true);
    check(options::Writer::Caller, "rw", "yes", file, false);
}

#[test]
fn a_variable_that_is_empty_names_no_file() {
    let named = || Named { store: "/store".into(), mountpoint: "/mnt".into(), ..Named::default() };
    let with = |path: &'static str| {
        resolve(named(), options::Parsed::default(), &|name| {
            (name == "KVFS_CONFIG").then(|| path.into())
        })
    };
    assert!(with("").is_ok());
    assert!(with("/nowhere/kvfs.toml").unwrap_err().line().contains("No such file"));
}

#[test]
fn a_mount_that_is_offline_leaves_its_remote_alone() {
    let file = "remote = \"/r\"\nssd = \"1G\"";
    let layer = || layer(&[("offline", "yes")]);
    assert!(resolved(Layer::default(), "", &[], file).unwrap().options.remote.is_some());
    assert!(resolved(layer(), "", &[], file).unwrap().options.remote.is_none());
    assert!(resolved(layer(), "remote=share", &[], "").is_err());
}

#[test]
fn a_budget_for_writes_is_of_a_day() {
    let budget = |options: &str| {
        let config = resolved(Layer::default(), options, &[], "").unwrap();
        config.options.ssd_writes_day_bytes
    };
    assert_eq!(budget("ssd_writes=2G/day,ram=1G,remote=/r"), Some(2 << 30));
    assert_eq!(budget("ssd_writes=2G,ram=1G,remote=/r"), Some(2 << 30));
    assert_eq!(budget("ssd_writes=none"), None);
}

#[test]
fn flags_are_collected_and_opposites_replaced() {
    let config = resolved(Layer::default(), "exec", &[], "options = [\"noexec\", \"noatime\"]");
    assert_eq!(config.unwrap().options.kernel_options, ["noatime"]);
}

#[test]
fn the_filter_of_kvfs_counts_before_that_of_rust() {
    let variables = [("RUST_LOG", "trace"), ("KVFS_LOG", "warn")];
    let config = resolved(Layer::default(), "", &variables, "").unwrap();
    assert_eq!(config.log_level.as_deref(), Some("warn"));
    let config = resolved(Layer::default(), "", &variables[..1], "").unwrap();
    assert_eq!(config.log_level.as_deref(), Some("trace"));
}

#[test]
fn refused() {
    fn check(dash_o: &str, environment: &[(&str, &str)], file: &str, expected: &str) {
        let failure = resolved(Layer::default(), dash_o, environment, file).unwrap_err();
        assert!(matches!(failure, Failure::Usage(_)));
        assert!(failure.line().contains(expected), "{}", failure.line());
        assert!(!failure.line().contains('\n'), "{}", failure.line());
    }
    check("nvme=1G", &[], "", "unknown mount option \"nvme=1G\": see kvfs mount --help");
    check(
        "ssd=1G",
        &[],
        "",
        "ssd is set, but neither remote nor cold: objects could neither leave",
    );
    check("ssd=1G,cold=none", &[], "", "ssd is set, but neither remote nor cold");
    let needs = "ssd_writes is set, but not both of ram and remote";
    check("ssd_writes=1G/day,ram=1G", &[], "", needs);
    check("ssd_writes=1G/day,remote=/r", &[], "", needs);
    check("ssd_writes=1G/week", &[], "", "\"1G/week\" is no size for a day: write 200G/day");
    check("ssd_writes=5,ram=1G,remote=/r", &[], "", "ssd_writes is 5: must be at least 1048576");
    check("ssd=1M,cold=zstd", &[], "", "ssd is 1048576: must be at least 16777216 bytes");
    check("cold=q8_0", &[], "", "lossy encodings are a model's choice");
    check("rebuild_from=none", &[], "", "rebuild_from is set, but no remote");
    check("remote=/r,rebuild_from=7", &[], "", "rebuild_from is \"7\": must be none or the id");
    check("metrics_addr=localhost:9400", &[], "", "metrics_addr: \"localhost:9400\" is no address");
    check("remote_bandwidth=1M", &[], "", "remote_bandwidth is set, but no remote");
    check("remote_index=1", &[], "", "remote_index is set, but no remote");
    check(
        "remote=/r,remote_index=0.01",
        &[],
        "",
        "remote_index is 0.01: must be 0 (never) or from",
    );
    check("remote=/r,ssd=1M", &[], "", "ssd is 1048576: must be at least 16777216 bytes");
    check("verify=twice", &[], "", "verify: \"twice\" is neither first, always nor never");
    check("on_corrupt=skip", &[], "", "on_corrupt: \"skip\" is neither miss nor eio");
    check("remote=/r,cold=lz4", &[], "", "cold: \"lz4\" is no cold encoding");
    check("remote=share", &[], "", "remote: ");
    check("remote=/r,remote_bandwidth=0", &[], "", "remote_bandwidth is 0: nothing would ever");
    check("threads=0", &[], "", "threads is 0: must be from 1 to 64");
    check(
        "",
        &[("KVFS_RAM", "x")],
        "",
        "\"x\" is no size: write bytes or a number with K, M, G or T",
    );
    check("", &[("KVFS_THREADS", "x")], "", "KVFS_THREADS is \"x\": must be a number");
    check("", &[("KVFS_READ_ONLY", "x")], "", "KVFS_READ_ONLY is \"x\": must be yes or no");
    let interval = "must be from 0.01 to 3600 seconds";
    check("commit_interval=0", &[], "", interval);
    check("commit_interval=nan", &[], "", "commit_interval: \"nan\" is no duration");
    check("commit_interval=-1", &[], "", "commit_interval: \"-1\" is no duration");
    check("log_file=kvfs.log", &[], "", "log_file kvfs.log must be an absolute path");
    check("", &[], "options = [\"ro\"]", "options has \"ro\": not a flag such as noatime");
    let failure = resolved(Layer::default(), "", &[], "threads = 1\nnvme = 4").unwrap_err();
    assert!(failure.line().contains("line 2: unknown setting \"nvme\""), "{}", failure.line());
}

#[test]
fn memory_is_not_switched_off_by_a_forgotten_unit() {
    for bytes in [1, 16, RAM_BYTES_MIN - 1] {
        let why = check_memory(bytes).unwrap_err();
        assert!(why.contains("give 64K at least (a number alone is bytes: 16G)"), "{why}");
    }
    for bytes in [0, RAM_BYTES_MIN] {
        assert_eq!(check_memory(bytes), Ok(()));
    }
}
