import Foundation

/// What can go wrong; each message says what to do.
public enum H2OError: Error, Equatable, Sendable, LocalizedError {
    /// A setting is out of range, or settings do not fit together.
    case configuration(String)
    /// The policy must see attention and the model computes it by itself.
    case policyNeedsAttention(policy: String, model: String)
    /// Some layers of the model cannot be bounded.
    case partial(String)
    /// A profile is damaged, or another model's.
    case profile(String)
    /// A file is no readable prompt cache.
    case file(String)
    /// Not of this cache, or not now: more tokens to take back than can be, say.
    case state(String)
    /// A policy of the app's own failed.
    case policy(String)
    /// MLX failed, or memory ran out.
    case `internal`(String)

    /// The message for people.
    public var errorDescription: String? {
        switch self {
        case .configuration(let message), .partial(let message), .profile(let message),
            .file(let message), .state(let message), .policy(let message), .internal(let message):
            message
        case .policyNeedsAttention(let policy, let model):
            "Policy \"\(policy)\" must see attention, which \(model) computes by itself. Call "
                + "H2OModels.register() before loading a Llama or Qwen model, let your own model "
                + "attend through h2oAttention(...), or choose a policy that looks at keys only: "
                + "H2OPolicies.KeyDiff(), H2OPolicies.Streaming() or H2OPolicies.Distinct.keysOnly."
        }
    }
}
