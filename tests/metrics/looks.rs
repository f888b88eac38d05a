//! The page as a browser shows it: with names that would be markup, narrow and wide, light and dark, without scripts, and
//! when the mount ends.

use serde_json::json;

use crate::chromium::Chromium;
use crate::common::{Mode, Mount};
use crate::page::{HOSTILE, coded, owners_address, with_names};

const OPTIONS: [&str; 8] =
    ["--metrics-addr", "127.0.0.1:0", "--ram", "64M", "--ssd", "1G", "--cold", "zstd"];

/// What stands out at the right, and cannot be moved there by a bar of its own.
const TOO_WIDE: &str = "[...document.body.querySelectorAll('*')].filter((part) => \
    part.getBoundingClientRect().right > document.documentElement.clientWidth && !part.closest('.scroll, pre, datalist'))\
    .map((part) => part.tagName + ' ' + part.id + ' ' + part.textContent.slice(0, 40))";

#[test]
fn in_a_browser() {
    require!(fuse, chromium);
    let mut mount = Mount::with_options(Mode::Served, &OPTIONS);
    let model = with_names(&mount);
    let strange = "--host-resolver-rules=MAP evil.example 127.0.0.1";
    let mut chromium = Chromium::start(&[strange]);
    let (address, _) = owners_address(&mount);
    let sequence = model.sequence(&mount, HOSTILE);
    let sequence = sequence.strip_prefix(mount.path()).unwrap().to_str().unwrap();
    let coded = coded(sequence);

    chromium.open(&address.replace('#', &format!("?map={coded}#")));
    let text = chromium.wait_for("2 layers by");
    for words in
        ["\u{2713} ok", "memory", "disk", "refused", "onerror=document.title", "\\u{1b}[2J"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(chromium.value("document.querySelectorAll('img').length"), json!(0));
    assert!(!chromium.value("document.title").as_str().unwrap().contains("harm"));
    // The token stands in no address that somebody may copy.
    assert!(!chromium.value("location.href").as_str().unwrap().contains('#'));
    chromium.wait_for(" ago");
    for (width, is_dark, name) in [
        (1440, false, "wide"),
        (1440, true, "wide-dark"),
        (360, false, "narrow"),
        (360, true, "narrow-dark"),
    ] {
        chromium.shape(width, is_dark);
        chromium.picture(name);
        assert_eq!(chromium.value(TOO_WIDE), json!([]), "{name}");
    }

    let again = the_mount_ends(&mut chromium, &mut mount);
    let (address, _) = owners_address(&again);
    let (address, _) = address.split_once('#').unwrap();
    without_a_token(&mut chromium, address);
    let strange = address.replace("127.0.0.1", "evil.example");
    chromium.open(&strange);
    let text = chromium.wait_for("is not one of this mount's");
    assert!(!text.contains("disk"), "{text}");
}

/// The page says so, and what it shows is marked as old; with the next mount it needs the next token.
fn the_mount_ends(chromium: &mut Chromium, mount: &mut Mount) -> Mount {
    let address = mount.status("metrics_address");
    assert!(mount.unmount().success());
    chromium.wait_for("The mount does not answer");
    assert_eq!(chromium.value("document.getElementById('app').className"), json!("stale"));
    assert_eq!(chromium.value("document.getElementById('state').innerText"), json!("? not known"));
    chromium.picture("ended");
    let again = Mount::of_store_with(
        Mode::Served,
        &["--metrics-addr", &address, "--ram", "64M", "--ssd", "1G", "--cold", "zstd"],
        mount.store(),
    );
    chromium.wait_for("with another token");
    let text = chromium.wait_for("open the address that stands in .kvfs/page of the mount");
    assert!(!text.contains("onerror"), "{text}");
    again
}

/// Sums alone; and without scripts the same as text.
fn without_a_token(chromium: &mut Chromium, address: &str) {
    chromium.open(address);
    let text = chromium.wait_for("They are shown to who mounted");
    assert!(text.contains("\u{2713} ok") && !text.contains("onerror"), "{text}");
    chromium.shape(360, false);
    chromium.picture("sums");
    chromium.call("Emulation.setScriptExecutionDisabled", &json!({ "value": true }));
    chromium.open(address);
    // Scripts of the tools are not those of the page.
    let text = chromium.wait_for("Trouble since the mount began");
    assert!(!text.contains("Draw"), "{text}");
    chromium.picture("text");
    chromium.call("Emulation.setScriptExecutionDisabled", &json!({ "value": false }));
}
