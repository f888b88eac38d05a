use super::*;

const STATUS: &str = "version: 1\npid: 7\nstore: /secret/store\nmountpoint: /mnt/kv\nstate: degraded\n\
    state_reason: the remote is down for 7 s: s3://secret-bucket; 2 damaged files\n\
    remote: s3://secret-bucket\nremote_state: down: secret-host refused\nremote_given_up_reason: secret\n\
    uptime_seconds: 9\nquota files/secret: size=1\nlast_event: 3\n";
const METRICS: &str = "kvfs_damaged_files{mount=\"/mnt/kv\"} 2\nkvfs_remote_up{mount=\"/mnt/kv\"} 0\n\
    kvfs_tier_used_bytes{tier=\"remote\",mount=\"/mnt/kv\"} 5\nkvfs_pages{mount=\"/mnt/kv\"} 3\n";

fn event(number: u64) -> String {
    let path = "files/secret <img x>";
    let time = "2026-11-25T02:41:09.123Z";
    json!({ "number": number, "time": time, "what": "deleted", "path": path, "reason": "secret", "files": 1 })
        .to_string()
}

fn browser(events: std::ops::RangeInclusive<u64>) -> Browser {
    let browser = Browser::default();
    let lines: Vec<String> = events.map(event).collect();
    browser.note(Told {
        status: STATUS.to_owned(),
        metrics: METRICS.to_owned(),
        events: lines.join("\n"),
        hottest: "5 models/secret/sequences/a\n".to_owned(),
    });
    browser
}

#[test]
fn sums_have_no_names() {
    let browser = browser(1..=3);
    let (json, document) = (browser.figures(Access::Sums), browser.document(Access::Sums, "0"));
    for told in [&json, &document] {
        assert!(!told.contains("secret"), "{told}");
        assert!(told.contains("degraded") && told.contains("/mnt/kv"), "{told}");
        assert!(told.contains("the remote does not answer"), "{told}");
    }
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&json["pages"], &json["access"], &json["status"]),
        (&3.into(), &"sums".into(), &Value::Null)
    );
    assert_eq!(json["tiers"][0]["state"], "down");
}

#[test]
fn the_owner_is_shown_everything_and_no_markup() {
    let browser = browser(1..=3);
    let json = browser.figures(Access::All);
    for told in ["secret-bucket", "/secret/store", "models/secret/sequences/a", "files/secret"] {
        assert!(json.contains(told), "{told}: {json}");
    }
    let document = browser.document(Access::All, "0");
    assert!(document.contains("&lt;img") && !document.contains("<img"), "{document}");
}

#[test]
fn the_last_events_are_kept() {
    let browser = browser(1..=200);
    assert_eq!(browser.last_event(), 200);
    let json: Value = serde_json::from_str(&browser.figures(Access::All)).unwrap();
    let events = json["events"].as_array().unwrap();
    assert_eq!(events.len(), usize::from(EVENTS_MAX));
    assert_eq!((&events[0]["number"], &events[49]["number"]), (&200.into(), &151.into()));
}
