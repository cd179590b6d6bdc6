import MLXLLM
import MLXLMCommon

extension H2OConfiguration {
    /// ``caches(for:)-(LanguageModel)`` for the model in a container, to hand to `ChatSession`,
    /// `generate` or `TokenIterator`.
    ///
    /// - Throws: ``H2OError``, as there.
    public func caches(for container: ModelContainer) async throws -> sending [any KVCache] {
        // Nothing else has hold of them: they were made here.
        nonisolated(unsafe) let made = try await container.perform { context in
            Made(caches: try caches(for: context.model))
        }.caches
        return made
    }

    private struct Made: @unchecked Sendable {
        let caches: [any KVCache]
    }

    /// A container of the same model, weights and all, in which new caches are bounded: for whatever
    /// makes its caches by itself, as `ChatSession` does in the beginning and after `clear()`.
    ///
    /// The container that is given stays as it is. `GenerateParameters(maxKVSize:)` is the budget in
    /// tokens with mlx-swift-lm 3.31.4, and asks for its own sliding windows with later versions.
    ///
    /// - Throws: ``H2OError``: what the model cannot be bounded by; a model that is none of MLXLLM,
    ///   to whose caches only ``caches(for:)-(ModelContainer)`` leads.
    public func bounding(_ container: ModelContainer) async throws -> ModelContainer {
        try await container.perform { context in
            guard let model = context.model as? any LLMModel else {
                throw H2OError.configuration(
                    "\(type(of: context.model)) is no text model of MLXLLM: hand its caches in, with "
                        + "ChatSession(container, cache: try await configuration.caches(for: "
                        + "container)).")
            }
            var bounded = context
            bounded.model = try BoundedModel(model, self)
            return ModelContainer(context: bounded)
        }
    }
}

extension ChatSession {
    /// A chat whose memory is bounded, after `clear()` too.
    ///
    /// For other arguments of `ChatSession`, a history say:
    /// `ChatSession(try await configuration.bounding(container), history: messages)`.
    ///
    /// - Parameters:
    ///   - container: The model.
    ///   - configuration: How its caches are bounded.
    ///   - instructions: As in `ChatSession`.
    ///   - generateParameters: As in `ChatSession`; leave `maxKVSize` and the kind of cache as they are.
    ///   - additionalContext: As in `ChatSession`.
    /// - Throws: ``H2OError`` if the model cannot be bounded so.
    public convenience init(
        _ container: ModelContainer, h2o configuration: H2OConfiguration,
        instructions: String? = nil, generateParameters: GenerateParameters = .init(),
        additionalContext: [String: any Sendable]? = nil
    ) async throws {
        let configuration = try await configuration.pinning(
            instructions, in: container, additionalContext)
        self.init(
            try await configuration.bounding(container), instructions: instructions,
            generateParameters: generateParameters, additionalContext: additionalContext)
    }
}
