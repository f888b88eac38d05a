'use strict';
// Everything that is shown is put there as text, never as markup: names are anybody's.
const REFRESH_MILLISECONDS = 2000;
const PATIENCE_MILLISECONDS = 5000;
const element = (id) => document.getElementById(id);
const TOKEN = 'kvfs token';
let token = '';
let shown = null;
let answeredAt = 0;

function takeToken() {
  const given = location.hash.slice(1);
  try {
    // It stands in no address that somebody might copy or photograph, and is forgotten with the tab.
    if (/^[0-9a-f]{32}$/.test(given)) {
      sessionStorage.setItem(TOKEN, given);
      history.replaceState(null, '', location.pathname + location.search);
    }
    token = sessionStorage.getItem(TOKEN) || '';
  } catch {
    token = given;
  }
}

async function ask(address) {
  const limit = address.startsWith('page') ? PATIENCE_MILLISECONDS : 2 * PATIENCE_MILLISECONDS;
  const answer = await fetch(address, {
    headers: token ? { Authorization: 'Bearer ' + token } : {},
    signal: AbortSignal.timeout(limit),
    cache: 'no-store',
  });
  if (answer.ok) return answer.json();
  const error = new Error((await answer.text()).trim());
  error.status = answer.status;
  throw error;
}

// Words and numbers.

function bytes(count) {
  const units = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return (unit ? count.toFixed(1) : String(Math.round(count))) + ' ' + units[unit];
}
const whole = (count) => Math.round(count).toLocaleString('en').replaceAll(',', '\u202f');
const known = (value, words) => (value === null || value === undefined ? '-' : words(value));
const rate = (value) => known(value, (v) => (v > 0 && v < 10 ? v.toFixed(1) : whole(v)));
const percent = (share) => known(share, (v) => Math.round(v * 100) + ' %');
const took = (bound) => known(bound, (v) => (v < 1e-3 ? Math.round(v * 1e6) + ' us'
  : v < 1 ? Math.round(v * 1e3) + ' ms' : Math.round(v) + ' s'));
function time(seconds) {
  const [d, h, m] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min` : `${Math.floor(seconds)} s`;
}

// Parts of the document.

function make(name, text, style) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (style) made.className = style;
  return made;
}

function table(id, columns, rows, nothing) {
  const place = element(id);
  if (rows.length === 0) {
    const row = make('tr');
    row.append(make('td', nothing, 'faint'));
    place.replaceChildren(row);
    return;
  }
  const cells = (kind, values) => {
    const row = make('tr');
    values.forEach((value, at) => row.append(make(kind, value, columns[at][1] ? 'number' : '')));
    return row;
  };
  const head = make('thead');
  const body = make('tbody');
  const titles = cells('th', columns.map((column) => column[0]));
  for (const title of titles.children) title.scope = 'col';
  head.append(titles);
  body.append(...rows.map((row) => cells('td', row)));
  place.replaceChildren(head, body);
}

function list(id, lines) {
  element(id).replaceChildren(...lines.map((line) => make('li', line)));
}

function draw(kind, attributes) {
  const drawn = document.createElementNS('http://www.w3.org/2000/svg', kind);
  for (const [name, value] of Object.entries(attributes)) drawn.setAttribute(name, value);
  return drawn;
}

const WIDTH = 600;
const HEIGHT = 100;

/** How much a tier used over time, below a dashed line for its budget. */
function chart(points, name) {
  const picture = draw('svg', {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', class: 'chart', role: 'img',
    'aria-label': `${name} over time`,
  });
  const used = points.map((point) => point.value[0]);
  const budget = points.at(-1).value[1];
  const top = Math.max(...used, 1);
  // A budget that is far away would make a line of everything.
  const isNear = budget > 0 && budget < 8 * top;
  const highest = (isNear ? Math.max(budget, top) : top) * 1.05;
  const [first, last] = [points[0].at, points.at(-1).at];
  const x = (at) => (last > first ? (at - first) / (last - first) : 1) * WIDTH;
  const y = (value) => HEIGHT - (value / highest) * HEIGHT;
  const line = points.map((point) => `${x(point.at).toFixed(1)},${y(point.value[0]).toFixed(1)}`);
  picture.append(draw('polygon', { class: 'used', points: `0,${HEIGHT} ${line.join(' ')} ${WIDTH},${HEIGHT}` }));
  if (isNear) {
    const at = y(budget).toFixed(1);
    picture.append(draw('line', { class: 'most', x1: 0, x2: WIDTH, y1: at, y2: at }));
  }
  const box = make('div');
  const ends = make('div', undefined, 'ends');
  const least = Math.min(...used);
  ends.append(make('span', time(Math.max(0, last - first)) + ' ago'),
    make('span', `${bytes(least)} to ${bytes(Math.max(...used))}` + (isNear ? ', dashed: budget' : '')), make('span', 'now'));
  box.append(picture, ends);
  return box;
}

function tier(figures, past) {
  const box = make('div');
  const { name, used_bytes: used, capacity_bytes: most } = figures;
  box.append(make('h3', name + (figures.state ? ': ' + figures.state : '')));
  const part = most ? Math.min(1, used / most) : null;
  if (part !== null) {
    const bar = make('div', undefined, 'bar');
    const filled = make('div');
    filled.style.width = (part * 100).toFixed(1) + '%';
    bar.append(filled);
    box.append(bar);
  }
  const words = [part === null ? bytes(used) : `${bytes(used)} of ${bytes(most)} (${percent(part)})`];
  words.push(whole(figures.objects) + ' objects');
  if (figures.dirty_bytes) words.push(bytes(figures.dirty_bytes) + ' not on disk yet');
  if (figures.waiting_files) words.push(whole(figures.waiting_files) + ' files not there yet');
  box.append(make('div', words.join(', ')));
  const points = past.filter((point) => point[name]).map((point) => ({ at: point.at, value: point[name] }));
  if (points.length > 1) box.append(chart(points, name));
  else box.append(make('div', 'A picture over time begins after ten seconds.', 'faint'));
  return box;
}

function showState(told) {
  const [sign, style] = told.state === 'ok' ? ['\u2713', 'good']
    : told.state === 'read-only media' ? ['\u2713', 'good']
      : told.state === 'degraded' ? ['\u25b2', 'warning'] : ['\u2715', 'bad'];
  element('state').textContent = `${sign} ${told.state}`;
  element('state').className = 'badge ' + style;
  list('reasons', told.state_reasons);
}

function show(told) {
  element('text').hidden = true;
  element('app').hidden = false;
  element('app').classList.remove('stale');
  element('place').textContent = told.mountpoint;
  document.title = (told.state === 'ok' ? '' : '(!) ') + 'kvfs ' + told.mountpoint;
  showState(told);
  element('tiers').replaceChildren(...told.tiers.map((one) => tier(one, told.past)));
  table('hits', [['', 0], ['now', 1], ['since mount', 1]],
    told.hits.map((one) => [one.name, percent(one.share), percent(one.share_since_mount)]),
    'No prompt was asked for, and nothing was fetched ahead.');
  table('flows', [['', 0], ['per second', 1], ['bytes per second', 1], ['since mount', 1]],
    told.flows.map((one) => [one.name, rate(one.per_second),
      one.bytes_per_second ? bytes(one.bytes_per_second) : '', whole(one.total)]), 'Nothing yet.');
  table('requests', [['', 0], ['per second', 1], ['half', 1], ['99 %', 1], ['slow', 1]],
    told.requests.slice(0, 14).map((one) => [one.operation, rate(one.per_second), took(one.half_seconds),
      took(one.most_seconds), whole(one.slow)]), 'Nothing is asked of the mount.');
  table('troubles', [['', 0], ['since mount', 1]],
    told.troubles.map((one) => [one.name, whole(one.count)]), 'None.');
  const isAll = told.access === 'all';
  for (const section of document.querySelectorAll('.owner')) section.hidden = !isAll;
  element('locked').hidden = isAll;
  if (isAll) showNames(told);
  element('age').textContent = `kvfs ${told.version}, up for ${time(told.uptime_seconds || 0)}`;
}

function showNames(told) {
  table('opens', [['', 0], ['of the last opens', 1]],
    told.last_opens.slice(0, 12).map((one) => [one.path === '-' ? 'elsewhere' : one.path, whole(one.opens)]),
    'Nothing was opened.');
  table('events', [['time (UTC)', 0], ['what', 0], ['place', 0], ['why', 0]],
    told.events.map((one) => [one.time, one.what, one.place, one.why]), 'Nothing happened yet.');
  if (element('status').textContent !== told.status) element('status').textContent = told.status;
}

function notice(text) {
  element('notice').hidden = text === '';
  if (element('notice').textContent !== text) element('notice').textContent = text;
}

async function refresh() {
  try {
    const told = await ask('page.json');
    const isAnother = shown && (shown.uptime_seconds > told.uptime_seconds);
    if (isAnother) element('map').replaceChildren();
    show(told);
    shown = told;
    answeredAt = Date.now();
    notice(isAnother ? 'The mount was made anew meanwhile.' : '');
  } catch (error) {
    element('app').classList.add('stale');
    element('state').textContent = '? not known';
    element('state').className = 'badge bad';
    document.title = '(?) kvfs ' + element('place').textContent;
    const since = answeredAt ? ` What is shown is ${time((Date.now() - answeredAt) / 1000)} old.` : '';
    if (error.status === 401) {
      notice('Another mount answers here, with another token: open the address in .kvfs/page anew.');
      forget();
    } else if (error.status) {
      notice(error.message + since);
    } else {
      notice('The mount does not answer: it was unmounted, or its daemon has ended or hangs. '
        + 'It is asked again every two seconds.' + since);
    }
  }
}

function forget() {
  token = '';
  try { sessionStorage.removeItem(TOKEN); } catch { /* It was never there. */ }
}

// The map.

const STYLES = { '?': 'h' };

function row(told, width) {
  const line = make('div');
  const label = make('span', told.label, 'label');
  label.style.width = width + 'ch';
  label.title = told.label;
  line.append(label);
  let run = null;
  [...told.cells].forEach((letter, at) => {
    const kind = letter.toLowerCase();
    const style = /[a-z?]/.test(kind)
      ? `cell ${STYLES[kind] || kind}${told.ages[at] === '2' && kind !== 'x' ? ' older' : ''}` : '';
    if (!run || run.className !== style) {
      run = make('span', '', style);
      line.append(run);
    }
    run.append(letter);
  });
  return line;
}

function legend(told) {
  const lines = told.legend.map((one) => {
    const line = make('li');
    line.append(make('span', one.letter, 'cell swatch ' + (STYLES[one.letter] || one.letter)),
      `${one.words}: ${whole(one.pages)} pages, ${bytes(one.bytes)}`);
    return line;
  });
  const more = [[told.absent, '.', 'absent'], [told.pinned, 'capital letter', 'pinned'],
    [told.shared, '', 'shared with other sequences']].filter((one) => one[0] > 0);
  lines.push(...more.map(([count, sign, words]) => make('li', `${sign ? sign + ' ' : ''}${words}: ${whole(count)} pages`)));
  lines.push(make('li', 'pale: not used within a day'));
  return lines;
}

async function drawMap() {
  const button = element('ask').querySelector('button');
  button.disabled = true;
  element('extent').textContent = 'The mount is asked ...';
  try {
    const told = await ask('map.json?path=' + encodeURIComponent(element('path').value));
    element('extent').textContent = `${told.path}: ${told.extent}`;
    const width = Math.min(14, Math.max(...told.rows.map((one) => one.label.length), 1));
    element('map').replaceChildren(...told.rows.map((one) => row(one, width)));
    element('legend').replaceChildren(...legend(told));
  } catch (error) {
    element('extent').textContent = error.status ? error.message : 'The mount does not answer.';
    element('map').replaceChildren();
    element('legend').replaceChildren();
  }
  button.disabled = false;
}

async function offerPaths() {
  try {
    const told = await ask('names.json');
    element('paths').replaceChildren(...told.paths.map((path) => {
      const option = make('option');
      option.value = path;
      return option;
    }));
  } catch { /* A path can be written by hand. */ }
}

async function follow() {
  await refresh();
  const asked = new URLSearchParams(location.search).get('map');
  if (shown && shown.access === 'all') {
    await offerPaths();
    if (asked) {
      element('path').value = asked;
      await drawMap();
    }
  }
  for (;;) {
    await new Promise((done) => setTimeout(done, REFRESH_MILLISECONDS));
    // Nobody looks: nothing is asked.
    if (!document.hidden) await refresh();
  }
}

takeToken();
element('ask').addEventListener('submit', (event) => { event.preventDefault(); drawMap(); });
element('path').addEventListener('focus', offerPaths);
document.addEventListener('visibilitychange', () => { if (!document.hidden) refresh(); });
follow();
