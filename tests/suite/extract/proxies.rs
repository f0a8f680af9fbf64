//! Real proxies with the lines of the guide: each client is counted by its own address, whatever it
//! sends, and each trap that the guide names is one. `bash tests/proxies.sh` installs them first.

use std::{
    collections::BTreeMap,
    env, fs,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    process::{Child, Command, Stdio},
    time::Instant,
};

use axum::{Extension, Router, routing::get};
use http::{HeaderValue, Request};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tempfile::TempDir;
use tokio::{
    net::{TcpStream, UnixListener},
    time::sleep,
};
use tower_sliding_window::{ClientIp, Limit, MemoryStore, RateLimitLayer};

use crate::support::{http_server::serve, ms, redis_server::free_port, seconds};

const PAGE: &str = include_str!("../../../src/guide/behind_a_proxy.md");

const CALLS: Limit = Limit::per_hour("calls", 2);

/// Each is a client of its own. The proxies connect from 127.0.0.1.
const CLIENTS: [&str; 3] = ["127.0.0.2", "127.0.0.3", "::1"];

/// What a client sends to be counted as another. `#` becomes a number of its own.
fn forgeries() -> Vec<Vec<(&'static str, String)>> {
    let values = [
        "198.51.100.#",
        "127.0.0.3",
        "127.0.0.1",
        "::1",
        "[::1]",
        "2001:db8:#::1",
        "[2001:db8:#::1]:443",
        "198.51.100.#:99",
        "198.51.100.#, 127.0.0.1",
        "127.0.0.1, 198.51.100.#",
        "198.51.100.#,127.0.0.1,127.0.0.1",
        "198.51.100.#, ",
        ",",
        "unknown",
        "_hidden",
        "\"198.51.100.#\"",
        "\"198.51.100.#",
        "for=198.51.100.#",
        "198.51.100.#;127.0.0.1",
        "198.51.100.#\t,127.0.0.1",
        "::ffff:198.51.100.#",
        "0x7f.1",
        "localhost",
    ];
    let mut all: Vec<_> = values
        .map(|value| vec![("x-forwarded-for", value.to_owned())])
        .into();
    all.push(vec![(
        "x-forwarded-for",
        vec!["198.51.100.#"; 40].join(", "),
    )]);
    all.push(vec![
        ("x-forwarded-for", "198.51.100.#".to_owned()),
        ("x-forwarded-for", "127.0.0.1".to_owned()),
    ]);
    all.push(vec![
        ("x-forwarded-for", "127.0.0.1".to_owned()),
        ("x-forwarded-for", "198.51.100.#".to_owned()),
    ]);
    for hop in ["x-forwarded-for", "close, x-forwarded-for"] {
        all.push(vec![
            ("connection", hop.to_owned()),
            ("x-forwarded-for", "198.51.100.#".to_owned()),
        ]);
    }
    let others = [
        "x_forwarded_for",
        "x-real-ip",
        "x-client-ip",
        "x-original-forwarded-for",
        "true-client-ip",
        "cf-connecting-ip",
        "fly-client-ip",
        "x-cluster-client-ip",
        "x-envoy-external-address",
        "x-envoy-expected-rq-timeout-ms",
    ];
    all.extend(others.map(|name| vec![(name, "198.51.100.#".to_owned())]));
    all.extend(
        ["203.0.113.#", "192.0.2.#", "2001:db8:#::7"]
            .map(|address| vec![("x-real-ip", address.to_owned())]),
    );
    all.push(vec![("forwarded", "for=198.51.100.#".to_owned())]);
    all.push(vec![("forwarded", "for=\"[2001:db8:#::1]\"".to_owned())]);
    all
}

/// The programs of a section of the guide, in their order.
fn lines_of(section: &str) -> Vec<String> {
    let mut programs = Vec::new();
    let mut is_section = false;
    let mut is_program = false;
    for line in PAGE.lines() {
        if line.starts_with("```") {
            is_program = !is_program;
            programs.extend((is_section && is_program).then(String::new));
        } else if is_program && is_section {
            programs.last_mut().unwrap().extend([line, "\n"]);
        } else if !is_program && line.starts_with('#') {
            is_section = line.trim_start_matches('#').trim() == section;
        }
    }
    assert!(
        !programs.is_empty(),
        "`behind_a_proxy` has no section {section:?} with programs"
    );
    programs
}

/// A proxy on a free port, which ends with the test.
struct Proxy {
    process: Child,
    folder: TempDir,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // So that nginx and Apache end their workers, too.
        Command::new("kill")
            .arg(self.process.id().to_string())
            .status()
            .unwrap();
        self.process.wait().unwrap();
    }
}

impl Proxy {
    /// Waits until it listens.
    async fn start(kind: &str, lines: &str, port: u16) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Workers of a proxy are other users.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut process = command(kind, lines, folder.path(), port);
        let log = fs::File::create(folder.path().join("log")).unwrap();
        process
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .stdin(Stdio::null());
        let process = process
            .spawn()
            .unwrap_or_else(|error| panic!("{kind}: {error}: run `bash tests/proxies.sh`"));
        let proxy = Self { process, folder };
        let begun = Instant::now();
        while !is_ready(kind, port).await {
            let log = || fs::read_to_string(proxy.folder.path().join("log"));
            assert!(
                begun.elapsed() < seconds(20),
                "{kind} does not listen: {:?}",
                log()
            );
            sleep(ms(20)).await;
        }
        proxy
    }
}

/// Traefik listens before it knows its routes.
async fn is_ready(kind: &str, port: u16) -> bool {
    match kind {
        "traefik" => reqwest::get(format!("http://127.0.0.1:{port}/"))
            .await
            .is_ok_and(|response| response.status() != 404),
        _ => TcpStream::connect(("127.0.0.1", port)).await.is_ok(),
    }
}

/// The program of this kind with these lines.
fn command(kind: &str, lines: &str, folder: &Path, port: u16) -> Command {
    let program = env::var(kind.to_uppercase()).unwrap_or_else(|_| kind.to_owned());
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let write = |name: &str, text: &str| {
        fs::write(folder.join(name), text).unwrap();
        path(name)
    };
    let mut command = Command::new(program);
    match kind {
        "nginx" => {
            let text = format!(
                "daemon off; pid {}; error_log stderr; worker_processes 1; events {{}}\nhttp {{ access_log off;\n{lines}\n}}",
                path("pid"),
            );
            command.args([
                "-e",
                "stderr",
                "-p",
                &path(""),
                "-c",
                &write("nginx.conf", &text),
            ])
        }
        "haproxy" => command.args(["-db", "-f", &write("haproxy.cfg", lines)]),
        "apache2" => {
            let modules = ["mpm_event", "authz_core", "proxy", "proxy_http"];
            let modules = modules.map(|name| {
                format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n")
            });
            let text = format!(
                "ServerName localhost\nListen {port}\nPidFile {}\nErrorLog /dev/stderr\n{}{lines}\n",
                path("pid"),
                modules.concat(),
            );
            command.args([
                "-DFOREGROUND",
                "-d",
                &path(""),
                "-f",
                &write("apache.conf", &text),
            ])
        }
        "caddy" => {
            let text = format!("{{\n    admin off\n    persist_config off\n}}\n{lines}");
            command.env("HOME", folder).args([
                "run",
                "--adapter",
                "caddyfile",
                "--config",
                &write("Caddyfile", &text),
            ])
        }
        "traefik" => {
            let [settings, routes] =
                ["# traefik.yml\n", "# app.yml\n"].map(|name| lines.split(name).nth(1).unwrap());
            let routes = write("app.yml", routes);
            let settings = settings
                .split("# app.yml")
                .next()
                .unwrap()
                .replace("app.yml", &routes);
            command.arg(format!("--configfile={}", write("traefik.yml", &settings)))
        }
        "envoy" => command.args([
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "-c",
            &write("envoy.yaml", lines),
        ]),
        _ => panic!("{kind} is no proxy"),
    };
    command
}

fn free_ports<const N: usize>() -> [u16; N] {
    [(); N].map(|()| free_port())
}

async fn serve_app(by: ClientIp) -> SocketAddr {
    serve(app(by))
        .await
        .trim_start_matches("http://")
        .parse()
        .unwrap()
}

fn app(by: ClientIp) -> Router {
    Router::new()
        .route("/", get(|| async {}))
        .layer(RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(by)))
}

fn behind() -> ClientIp {
    ClientIp::behind(["127.0.0.1"]).unwrap()
}

/// The number of admitted requests of each client that sends all forgeries. It is 2 if it is
/// counted by its own address.
async fn admitted(port: u16, clients: &[&'static str]) -> BTreeMap<&'static str, usize> {
    let mut admitted = BTreeMap::new();
    let mut number = 0;
    for client in clients {
        let address: IpAddr = client.parse().unwrap();
        let mut connector = HttpConnector::new();
        connector.set_local_address(Some(address));
        let connection: Client<_, Empty<Bytes>> =
            Client::builder(TokioExecutor::new()).build(connector);
        let host = if address.is_ipv6() {
            Ipv6Addr::LOCALHOST.into()
        } else {
            IpAddr::from([127, 0, 0, 1])
        };
        for forgery in forgeries() {
            number += 1;
            let mut request = Request::get(format!("http://{}/", SocketAddr::new(host, port)));
            for (name, value) in &forgery {
                let value = value.replace('#', &(number % 250).to_string());
                request = request.header(*name, HeaderValue::from_str(&value).unwrap());
            }
            let response = connection
                .request(request.body(Empty::new()).unwrap())
                .await
                .unwrap();
            let status = response.status().as_u16();
            // Some proxies take a strange header for a mistake.
            assert!(
                [200, 429, 400].contains(&status),
                "{client}: {status} for {forgery:?}"
            );
            *admitted.entry(*client).or_default() += usize::from(status == 200);
        }
    }
    admitted
}

/// Starts the proxy with the lines of its section, changed by `change`, in front of a server.
async fn admitted_behind(
    kind: &str,
    section: &str,
    by: ClientIp,
    change: (&str, &str),
) -> BTreeMap<&'static str, usize> {
    let [port] = free_ports();
    let app = serve_app(by).await;
    let lines = lines_of(section).remove(0);
    let (from, to) = change;
    assert!(lines.contains(from), "{section} has no {from:?}");
    let lines = lines
        .replacen(from, to, 1)
        .replace("8080", &port.to_string())
        .replace("3000", &app.port().to_string());
    let _proxy = Proxy::start(kind, &lines, port).await;
    admitted(port, &CLIENTS).await
}

async fn counts_each_client(kind: &str, section: &str) {
    let begun = Instant::now();
    let admitted = admitted_behind(kind, section, behind(), ("", "")).await;
    println!("{section}: {admitted:?} in {:.1?}", begun.elapsed());
    assert_eq!(
        admitted.into_iter().collect::<Vec<_>>(),
        CLIENTS.map(|client| (client, 2)),
        "{section}"
    );
}

async fn is_a_trap(kind: &str, section: &str, by: ClientIp, change: (&str, &str)) {
    let admitted = admitted_behind(kind, section, by, change).await;
    println!("{section} with {change:?}: {admitted:?}");
    assert!(
        admitted["127.0.0.2"] > 2,
        "{section} with {change:?}: {admitted:?}"
    );
}

#[tokio::test]
#[ignore = "tests/proxies.sh installs the proxy"]
async fn nginx() {
    counts_each_client("nginx", "nginx").await;
    let line = "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;";
    is_a_trap(
        "nginx",
        "nginx",
        behind(),
        (line, "proxy_set_header X-Other 1;"),
    )
    .await;
    is_a_trap(
        "nginx",
        "nginx",
        behind().single_header("x-real-ip"),
        ("", ""),
    )
    .await;
}

#[tokio::test]
#[ignore = "tests/proxies.sh installs the proxy"]
async fn haproxy() {
    counts_each_client("haproxy", "haproxy").await;
    let option = "option forwardfor";
    is_a_trap(
        "haproxy",
        "haproxy",
        behind(),
        (option, "option forwardfor if-none"),
    )
    .await;
    is_a_trap(
        "haproxy",
        "haproxy",
        behind(),
        (option, "option forwardfor except 127.0.0.0/8"),
    )
    .await;
    is_a_trap(
        "haproxy",
        "haproxy",
        behind().single_header("x-real-ip"),
        ("", ""),
    )
    .await;
}

#[tokio::test]
#[ignore = "tests/proxies.sh installs the proxy"]
async fn apache() {
    counts_each_client("apache2", "Apache").await;
    is_a_trap(
        "apache2",
        "Apache",
        behind(),
        ("ProxyPass", "ProxyAddHeaders Off\nProxyPass"),
    )
    .await;
}

#[tokio::test]
#[ignore = "tests/proxies.sh installs the proxy"]
async fn caddy() {
    counts_each_client("caddy", "Caddy").await;
    is_a_trap(
        "caddy",
        "Caddy",
        behind().single_header("x-real-ip"),
        ("", ""),
    )
    .await;
}

#[tokio::test]
#[ignore = "tests/proxies.sh installs the proxy"]
async fn traefik() {
    counts_each_client("traefik", "Traefik").await;
    let insecure = "address: \":8080\"\n    forwardedHeaders: { insecure: true }";
    is_a_trap(
        "traefik",
        "Traefik",
        behind().single_header("x-real-ip"),
        ("address: \":8080\"", insecure),
    )
    .await;
    // It overwrites this header.
    let by = behind().single_header("x-real-ip");
    assert_eq!(
        admitted_behind("traefik", "Traefik", by, ("", "")).await["127.0.0.2"],
        2
    );
}

#[tokio::test]
#[ignore = "tests/proxies.sh installs the proxy"]
async fn envoy() {
    counts_each_client("envoy", "Envoy").await;
    is_a_trap(
        "envoy",
        "Envoy",
        behind(),
        ("use_remote_address: true", "use_remote_address: false"),
    )
    .await;
    is_a_trap(
        "envoy",
        "Envoy",
        behind().single_header("x-real-ip"),
        ("", ""),
    )
    .await;
}

#[tokio::test]
#[ignore = "tests/proxies.sh installs the proxies"]
async fn haproxy_in_front_of_nginx() {
    let [outer, inner] = free_ports();
    let app = serve_app(behind()).await;
    let port = |lines: String, from: &str, to: u16| lines.replace(from, &to.to_string());
    let nginx = lines_of("nginx").remove(0).replace("listen [::]:8080;", "");
    let nginx = port(port(nginx, "8080", inner), "3000", app.port());
    let haproxy = port(
        port(lines_of("haproxy").remove(0), "8080", outer),
        "3000",
        inner,
    );
    let _inner = Proxy::start("nginx", &nginx, inner).await;
    let _outer = Proxy::start("haproxy", &haproxy, outer).await;
    let admitted = admitted(outer, &CLIENTS).await;
    println!("haproxy in front of nginx: {admitted:?}");
    assert!(
        admitted.values().all(|admitted| *admitted == 2),
        "{admitted:?}"
    );
}

#[tokio::test]
#[ignore = "tests/proxies.sh installs the proxies"]
async fn the_proxy_protocol_in_front_of_nginx() {
    for (from, is_trap) in [("", false), ("real_ip_header proxy_protocol;", true)] {
        let [outer, inner] = free_ports();
        let app = serve_app(behind()).await;
        let [front, nginx] =
            <[String; 2]>::try_from(lines_of("The PROXY protocol in front of nginx")).unwrap();
        let port = |lines: String| {
            let lines = lines
                .replacen(from, "", 1)
                .replace("8080", &outer.to_string());
            lines
                .replace("8081", &inner.to_string())
                .replace("3000", &app.port().to_string())
        };
        // A connection without the protocol's first line is refused, but it shows that nginx
        // listens.
        let _inner = Proxy::start("nginx", &port(nginx), inner).await;
        let _outer = Proxy::start("haproxy", &port(front), outer).await;
        let admitted = admitted(outer, &CLIENTS).await;
        println!("the PROXY protocol in front of nginx, without {from:?}: {admitted:?}");
        assert_eq!(
            admitted.values().all(|admitted| *admitted == 2),
            !is_trap,
            "{admitted:?}"
        );
        assert!(!is_trap || admitted["127.0.0.2"] > 2, "{admitted:?}");
    }
}

#[tokio::test]
#[ignore = "tests/proxies.sh installs the proxy"]
async fn nginx_over_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let socket = folder.path().join("http.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let app = app(behind()).layer(Extension(SocketAddr::from(([127, 0, 0, 1], 0))));
    tokio::spawn(async { axum::serve(listener, app).await });
    let [port] = free_ports();
    let lines = lines_of("A Unix socket").pop().unwrap();
    let lines = lines
        .replace("8080", &port.to_string())
        .replace("/run/app/http.sock", socket.to_str().unwrap());
    let _proxy = Proxy::start("nginx", &lines, port).await;
    let get = async || {
        reqwest::get(format!("http://127.0.0.1:{port}/"))
            .await
            .unwrap()
            .status()
            .as_u16()
    };
    // The workers of root's nginx are another user.
    if fs::metadata(&socket).unwrap().uid() == 0 {
        assert_eq!(get().await, 502, "its owner alone may connect");
    }
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(
        admitted(port, &CLIENTS[..2])
            .await
            .into_values()
            .collect::<Vec<_>>(),
        [2, 2]
    );
}
