import MLX
import MLXLMCommon

extension H2OConfiguration {
    /// The configuration whose pins are the positions of a conversation's instructions, where they are
    /// ``Pins/instructions``.
    ///
    /// - Parameters:
    ///   - instructions: What the model is told first; nil pins nothing.
    ///   - container: The model, whose chat template is asked.
    ///   - additionalContext: Values for the chat template.
    /// - Throws: The template's error.
    public func pinning(
        _ instructions: String?, in container: ModelContainer,
        _ additionalContext: [String: any Sendable]? = nil
    ) async throws -> H2OConfiguration {
        guard pins == .instructions else { return self }
        let count = try await container.perform { context in
            try await Self.tokens(of: instructions, context, additionalContext)
        }
        return pinning(first: count)
    }

    /// The same with so many tokens at the beginning.
    func pinning(first count: Int) -> H2OConfiguration {
        var changed = self
        changed.pins = count > 0 ? .positions([0 ..< count]) : .none
        return changed
    }

    /// How many tokens a conversation begins with, whatever the user says.
    static func tokens(
        of instructions: String?, _ context: ModelContext,
        _ additionalContext: [String: any Sendable]?, _ tools: [ToolSpec]? = nil
    ) async throws -> Int {
        guard let instructions else { return 0 }
        // Where two conversations that differ in what the user says are the same.
        var renderings: [[Int]] = []
        for prompt in ["yes", "no"] {
            let input = UserInput(
                chat: [.system(instructions), .user(prompt)], tools: tools,
                additionalContext: additionalContext)
            let tokens = try await context.processor.prepare(input: input).text.tokens
            renderings.append(tokens.flattened().asArray(Int.self))
        }
        return zip(renderings[0], renderings[1]).prefix { $0 == $1 }.count
    }
}
