import Foundation
import MLX
import MLXLMCommon

@testable import MLXH2O

/// The text of the embedded model's tokens, and the model in a container.
struct Recall: Tokenizer {
    static let question = "question"

    let bosToken: String? = nil
    let eosToken: String? = nil
    let unknownToken: String? = nil
    private let vocabulary: [[UInt8]]

    init() throws {
        struct File: Decodable {
            struct Model: Decodable { let vocab: [String: Int] }
            let model: Model
        }
        let url = GoldenReplay.embeddedModel.appendingPathComponent("tokenizer.json")
        let tokens = try JSONDecoder().decode(File.self, from: Data(contentsOf: url)).model.vocab
        // Bytes that are no printable character are written as those from U+0100 on, in order.
        let printable = Array(0x21 ... 0x7e) + Array(0xa1 ... 0xac) + Array(0xae ... 0xff)
        let others = (0 ... 0xff).filter { !printable.contains($0) }
        var bytes = Dictionary(uniqueKeysWithValues: printable.map { ($0, UInt8($0)) })
        for (i, byte) in others.enumerated() { bytes[0x100 + i] = UInt8(byte) }
        var vocabulary = [[UInt8]](repeating: [], count: tokens.values.max()! + 1)
        for (text, token) in tokens where token > 0 {
            vocabulary[token] = text.unicodeScalars.map { bytes[Int($0.value)]! }
        }
        self.vocabulary = vocabulary
    }

    func decode(tokenIds: [Int], skipSpecialTokens: Bool) -> String {
        String(decoding: tokenIds.flatMap { vocabulary[$0] }, as: UTF8.self)
    }

    func encode(text: String, addSpecialTokens: Bool = false) -> [Int] { [] }
    func convertTokenToId(_ token: String) -> Int? { nil }
    func convertIdToToken(_ id: Int) -> String? { nil }

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?,
        additionalContext: [String: any Sendable]?
    ) throws -> [Int] { [] }

    /// The embedded model, whose template writes the question in its tokens and nothing around it.
    static func container(question: [Int]) throws -> ModelContainer {
        let model = try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float32)
        return ModelContainer(
            context: ModelContext(
                configuration: ModelConfiguration(id: "recall"), model: model,
                processor: Template(question: question), tokenizer: try Recall()))
    }

    private struct Template: UserInputProcessor {
        let question: [Int]

        func prepare(input: UserInput) async throws -> LMInput {
            guard case .chat(let messages) = input.prompt else { throw H2OError.file("no chat") }
            let tokens = messages.flatMap {
                $0.content == Recall.question ? question : [$0.content.utf8.count]
            }
            return LMInput(tokens: MLXArray(tokens.map { Int32($0) }))
        }
    }
}
