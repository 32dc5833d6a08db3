// A certified provider of OpenID Connect on the loopback interface: node server.mjs PACKAGE PORT CLIENT
const [folder, port, client] = process.argv.slice(2);
const { Provider } = await import(`${folder}/oidc-provider/lib/index.js`);
const { exportJWK, generateKeyPair } = await import(`${folder}/jose/dist/webapi/index.js`);

const algorithms = ["RS256", "PS256", "ES256", "EdDSA"];
const keys = await Promise.all(
  algorithms.map(async (alg) => {
    const { privateKey } = await generateKeyPair(alg, { extractable: true });
    return { ...(await exportJWK(privateKey)), alg, use: "sig", kid: `key-${alg}` };
  }),
);

const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [JSON.parse(client)],
  jwks: { keys },
  cookies: { keys: ["only for tests"] },
  claims: { openid: ["sub"], profile: ["name", "groups"], email: ["email"] },
  enabledJWA: { idTokenSigningAlgValues: algorithms },
  pkce: { required: () => true },
  // The login name is the person, and what follows a plus sign is the group.
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, name: `${id} of the provider`, groups: [id.split("+")[1] ?? "nobody"] }),
  }),
});
provider.on("server_error", (_, error) => console.error(error));
provider.on("grant.error", (_, error) => console.error(error.error_detail ?? error.message));
provider.listen(Number(port), "127.0.0.1", () => console.log("listening"));
